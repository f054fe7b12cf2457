"""DGL's calls reach the chooser of our ops, with what is ready, and by a short way where they are plain ones."""

import importlib

import pytest
import torch
from dgl_compare import dgl, graph, rand

import gnnaccel
from gnnaccel import dgl_backend
from gnnaccel.dgl_backend.graph import structure
from gnnaccel.graph.structure import Graph
from gnnaccel.ops.ready import Ready

pytestmark = pytest.mark.usefixtures("dgl_restored")


@pytest.mark.parametrize("function,of_sources,of_edges,turns", [
    ("copy_u_sum", True, False, True),
    ("u_mul_e_sum", True, False, True),
    ("u_mul_e_sum", False, True, False),
    ("copy_u_max", True, False, False),
    ("u_mul_e_min", True, True, False),
    ("u_add_v", True, False, True),
    ("v_add_e", True, True, False),
])  # fmt: skip
def test_the_transposed_graph_is_made_for_gradients_of_sources_alone(function, of_sources, of_edges, turns):
    dgl_backend.enable()
    g = graph().formats("csc")
    x, w = rand(40, 3).requires_grad_(of_sources), rand(300, 3).requires_grad_(of_edges)
    given = {"copy_u": (x,), "u_mul_e": (x, w), "v_add_e": (x, w), "u_add_v": (x, x.detach())}
    getattr(dgl.ops, function)(g, *given[function.removesuffix("_sum").removesuffix("_max").removesuffix("_min")])
    assert (structure(g._graph)._transposed is not None) == turns


def test_sums_that_are_asked_for_again_are_ready():
    dgl_backend.enable()
    g, x = graph(), rand(40, 3).requires_grad_()
    outs = [dgl.ops.copy_u_mean(g, x) for _ in range(3)]
    assert [type(r) for r in structure(g._graph).ready.values()] == [Ready]
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outs]
    for out, grad in zip(outs, grads, strict=True):
        assert torch.equal(out, outs[0])
        torch.testing.assert_close(grad, grads[0])


@pytest.mark.parametrize("name,of", [("u_mul_e_sum", "spmm"), ("copy_u_mean", "spmm"), ("u_dot_v", "sddmm")])
def test_tiles_are_asked_for(name, of, monkeypatch):
    """On CUDA they serve where they pay; here they are said to, and run in their form for the CPU."""
    module = importlib.import_module(f"gnnaccel.ops.{of}")
    dgl_backend.enable()
    g, x, w = graph(), rand(40, 3), rand(300, 1)
    call = lambda: getattr(dgl.ops, name)(g, x, *{"u_mul_e_sum": (w,), "u_dot_v": (x,)}.get(name, ()))  # noqa: E731
    expected, asked = call(), []
    monkeypatch.setattr(Graph, "tiles_pay", lambda *_: True)
    monkeypatch.setattr(module, "serves_sum" if of == "spmm" else "serves_dot", lambda *_: asked.append(1) or True)
    torch.testing.assert_close(call(), expected)
    assert asked


def test_sums_by_tiles_have_the_dimensions_of_a_longer_weight():
    g, x, w = graph(), rand(40, 3), rand(300, 1, 1)
    structure_ = structure(g._graph)
    got, expected = (gnnaccel.ops.spmm(structure_, x, w, method=method) for method in ("tiled", "csr"))
    torch.testing.assert_close(got, expected)
