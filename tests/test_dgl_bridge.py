"""The bridge to CUDA, as far as a machine without a GPU can tell: it leaves graphs on the CPU alone."""

from __future__ import annotations

import sys

import pytest
import torch
from dgl_compare import dgl, graph
from dgl_structure_cases import STRUCTURE, tensors_of, with_data

from gnnaccel import dgl_backend
from gnnaccel.dgl_backend import bridge


@pytest.fixture
def bridged(monkeypatch):
    """The plug-in as on a machine with a GPU."""
    dgl_backend.disable()
    monkeypatch.setattr(bridge, "needed", lambda: True)
    dgl_backend.enable()
    yield
    dgl_backend.disable()


@pytest.mark.parametrize("name", STRUCTURE)
def test_cpu_graphs_are_left_alone(name, bridged):
    got = tensors_of(STRUCTURE[name](with_data()))
    dgl_backend.disable()
    want = tensors_of(STRUCTURE[name](with_data()))
    assert want
    for one, other in zip(got, want, strict=True):
        assert one.device.type == "cpu" and torch.equal(one, other)


def test_everything_is_put_back(monkeypatch):
    def state():
        from dgl._ffi.ndarray import NDArrayBase
        from dgl._ffi.object import ObjectBase
        from dgl.heterograph_index import HeteroGraphIndex

        holders = [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "dgl" and m is not None]
        holders += [NDArrayBase, ObjectBase, HeteroGraphIndex]
        return {(id(h), name): id(value) for h in holders for name, value in list(vars(h).items())}

    dgl_backend.disable()
    before = state()
    monkeypatch.setattr(bridge, "needed", lambda: True)
    dgl_backend.enable()
    assert state() != before
    dgl_backend.disable()
    assert state() == before


def test_pinning_is_refused(bridged):
    with pytest.raises(dgl.DGLError, match="gnnaccel: this DGL was built without CUDA, so its graphs cannot be pinned"):
        graph().pin_memory_()
