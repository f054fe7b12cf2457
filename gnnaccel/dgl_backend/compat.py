"""Making `import dgl` work: DGL 2.1.0 from PyPI imports GraphBolt, which has no library for torch above 2.2.1.

Everything happens in this process's memory; neither site-packages nor the home directory is written.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import types

KERNELS = "GNNACCEL_DGL_KERNELS"  # "torch" in the environment: message passing on torch's kernels, not ours
_MISSING = (
    "gnnaccel: dgl.graphbolt is not available: the installed DGL has no GraphBolt library for this torch. "
    "Use dgl.dataloading.NeighborSampler and DataLoader instead, or a DGL built for this torch"
)


class _Stub(types.ModuleType):
    """Stands in for dgl.graphbolt; every use of it says why it is not there."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{_MISSING} (asked for dgl.graphbolt.{name})")


def _graphbolt_can_load() -> bool:
    """True if the installed DGL has a GraphBolt library for the torch that will be imported."""
    found = importlib.util.find_spec("dgl")
    if found is None or not found.submodule_search_locations:
        return False
    try:
        from importlib.metadata import version

        torch_version = version("torch").split("+")[0]
        has_datapipes = importlib.util.find_spec("torchdata.datapipes") is not None
    except (ImportError, ValueError):
        return False
    folder = pathlib.Path(next(iter(found.submodule_search_locations))) / "graphbolt"
    return has_datapipes and any(folder.glob(f"*graphbolt_pytorch_{torch_version}.*"))


def shim() -> None:
    """Prepare this process for `import dgl`. Harmless to call again, or once DGL is imported."""
    os.environ.setdefault("DGLBACKEND", "pytorch")  # else DGL writes a file into the home directory
    if "dgl" in sys.modules or "dgl.graphbolt" in sys.modules or _graphbolt_can_load():
        return
    stub = _Stub("dgl.graphbolt", _MISSING)
    stub.__path__ = []
    # DGL asks isinstance() of it in its distributed part.
    vars(stub)["FusedCSCSamplingGraph"] = type("FusedCSCSamplingGraph", (), {"__module__": "dgl.graphbolt"})
    sys.modules["dgl.graphbolt"] = stub
