"""The DGL plug-in: `shim` makes DGL importable, `enable` puts our ops under its message passing.

All message passing of DGL, its own layers and user code alike, ends in a handful of autograd classes that
dgl.backend.pytorch.sparse looks up by name at each call; `enable` replaces those names, and more that touch.py lists.
"""

from __future__ import annotations

import sys

from gnnaccel.dgl_backend.compat import KERNELS, shim

__all__ = ["disable", "enable", "forget", "guard_sampling", "shim", "to_graph"]


def __getattr__(name: str):
    # Late: DGL must be importable without the binary, which `structure` needs, and touch.py imports DGL.
    if name in ("forget", "to_graph"):
        from gnnaccel.dgl_backend import structure

        return getattr(structure, name)
    if name == "guard_sampling":
        from gnnaccel.dgl_backend import touch

        return touch.guard_sampling
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def enable() -> None:
    """Run DGL's message passing on gnnaccel's ops. Imports DGL; does nothing when already enabled.

    With GNNACCEL_DGL_KERNELS=torch: on torch's own kernels, which is what `gnnaccel compare` measures ours against
    where DGL was built without CUDA. ValueError for another value of it.
    """
    import os

    from gnnaccel.dgl_backend import bridge, ops, our_kernels, torch_kernels, touch

    if touch.is_patched():
        return
    touch.guard_sampling()
    kernels = os.environ.get(KERNELS, "")
    if kernels not in ("", "torch"):
        raise ValueError(f"{KERNELS}={kernels} is not understood: expected torch")
    ops.kernels = torch_kernels if kernels == "torch" else our_kernels
    touch.patch(with_bridge=bridge.needed(), our_kernels=ops.kernels is our_kernels)


def is_enabled() -> bool:
    """True between `enable` and `disable`."""
    touch = sys.modules.get(f"{__name__}.touch")
    return touch is not None and touch.is_patched()


def disable() -> None:
    """Put back everything `enable` replaced."""
    if is_enabled():
        from gnnaccel.dgl_backend import block_index, touch

        block_index.make_all()
        touch.undo()
