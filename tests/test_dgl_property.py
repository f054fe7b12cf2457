"""Random graphs and random chains of changes to them: after each step the plug-in agrees with DGL alone."""

import pytest
import torch
from dgl_compare import dgl, rand
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnnaccel import dgl_backend


def _edges(draw, num_nodes, most=25):
    count = draw(st.integers(0, most))
    ends = st.lists(st.integers(0, num_nodes - 1), min_size=count, max_size=count)
    return torch.tensor(draw(ends), dtype=torch.int64), torch.tensor(draw(ends), dtype=torch.int64)


def _add_edges(draw, g):
    u, v = _edges(draw, g.num_nodes(), 4)
    g.add_edges(u.to(g.idtype), v.to(g.idtype))
    return g


def _subset(draw, count, g):
    chosen = sorted(draw(st.sets(st.integers(0, count - 1)))) if count else []
    return torch.tensor(chosen, dtype=g.idtype)


def _remove_edges(draw, g):
    g.remove_edges(_subset(draw, g.num_edges(), g))
    return g


def _add_nodes(draw, g):
    g.add_nodes(draw(st.integers(0, 3)))
    return g


def _remove_node(draw, g):
    if g.num_nodes() > 1:
        g.remove_nodes(torch.tensor([draw(st.integers(0, g.num_nodes() - 1))], dtype=g.idtype))
    return g


def _node_subgraph(draw, g):
    nodes = _subset(draw, g.num_nodes(), g)
    return g.subgraph(nodes) if len(nodes) else g


STEPS = {
    "add_edges": _add_edges,
    "remove_edges": _remove_edges,
    "add_nodes": _add_nodes,
    "remove_nodes": _remove_node,
    "node_subgraph": _node_subgraph,
    "edge_subgraph": lambda draw, g: g.edge_subgraph(_subset(draw, g.num_edges(), g), relabel_nodes=False),
    "reverse": lambda draw, g: dgl.reverse(g),
    "dtype": lambda draw, g: g.long() if g.idtype == torch.int32 else g.int(),
    "local_var": lambda draw, g: g.local_var(),
    "clone": lambda draw, g: g.clone(),
    "batch": lambda draw, g: dgl.batch([g, g]) if g.num_edges() < 60 else g,
    "add_self_loop": lambda draw, g: dgl.add_self_loop(g),
    "to_simple": lambda draw, g: dgl.to_simple(g),
    "create_formats_": lambda draw, g: g.create_formats_() or g,
}


def _results(g):
    x = rand(g.num_nodes(), 3).requires_grad_()
    w = rand(g.num_edges(), 1, seed=2).requires_grad_()
    outs = [dgl.ops.copy_u_sum(g, x), dgl.ops.u_mul_e_sum(g, x, w), dgl.ops.edge_softmax(g, w)]
    if g.num_edges():  # DGL alone fails in the backward of a maximum over no edges
        extreme = dgl.ops.copy_e_max(g, w)
        outs.append(torch.where(extreme.isinf(), 0.0, extreme))
    total = sum((o * rand(*o.shape, seed=5)).sum() for o in outs)
    grads = torch.autograd.grad(total, (x, w), allow_unused=True)
    return [*(o.detach() for o in outs), *grads]


@pytest.mark.reached
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_chains_of_changes(data):
    torch.set_num_threads(1)
    num_nodes = data.draw(st.integers(1, 12))
    idtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    g = dgl.graph(_edges(data.draw, num_nodes), num_nodes=num_nodes, idtype=idtype)
    steps = data.draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=5))
    try:
        for step in [None, *steps]:
            dgl_backend.enable()  # the change finds what the plug-in keeps, and makes its own use of it
            g = g if step is None else STEPS[step](data.draw, g)
            got = _results(g)
            dgl_backend.disable()
            for a, b in zip(got, _results(g), strict=True):
                torch.testing.assert_close(a, b, msg=lambda text, step=step: f"after {step} of {steps}: {text}")
    finally:
        dgl_backend.disable()
