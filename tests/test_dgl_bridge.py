"""The bridge to CUDA, as far as a machine without a GPU can tell: it leaves graphs on the CPU alone."""

from __future__ import annotations

import copy
import sys
import threading

import pytest
import torch
from dgl_compare import dgl
from dgl_structure_cases import STRUCTURE, tensors_of, with_data

from gnnaccel import dgl_backend
from gnnaccel.dgl_backend import bridge, nn


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


def test_layers_keep_what_they_allow(bridged):
    """Whether nodes without in-edges are allowed stays an attribute of the layer, in copies and for other threads."""
    layer = dgl.nn.GraphConv(4, 4)
    assert layer._allow_zero_in_degree is False and "_allow_zero_in_degree" in vars(layer)
    nn._known.layers = (layer,)
    try:
        assert layer._allow_zero_in_degree is True
        assert copy.deepcopy(layer)._allow_zero_in_degree is False
        seen = []
        thread = threading.Thread(target=lambda: seen.append(layer._allow_zero_in_degree))
        thread.start()
        thread.join()
        assert seen == [False]
    finally:
        del nn._known.layers
    layer.set_allow_zero_in_degree(True)
    dgl_backend.disable()
    assert layer._allow_zero_in_degree is True
    assert not hasattr(dgl.nn.GatedGraphConv(2, 2, 1, 1), "_allow_zero_in_degree")


def test_other_kernels_by_name(monkeypatch):
    dgl_backend.disable()
    monkeypatch.setenv("GNNACCEL_DGL_KERNELS", "cusparse")
    with pytest.raises(ValueError, match="GNNACCEL_DGL_KERNELS=cusparse is not understood"):
        dgl_backend.enable()
    dgl_backend.disable()
