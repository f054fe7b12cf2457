"""Switching the DGL plug-in on and off."""

import os
import sys
import textwrap
from pathlib import Path

import forked
import torch
from dgl_compare import compare, dgl, graph, rand

from gnnaccel import dgl_backend

import dgl.function as fn  # isort: skip  (after the shim)
import dgl.nn as dglnn  # isort: skip

ROOT = Path(__file__).resolve().parent.parent


def test_dgl_runs_alone_where_the_binary_cannot_be_loaded():
    code = """
        import sys
        sys.modules["gnnaccel._C"] = None
        import gnnaccel
        gnnaccel.install()
        import dgl, torch
        print(dgl.ops.copy_u_sum(dgl.graph(([0], [1])), torch.ones(2, 1)).tolist())
    """
    environment = {k: v for k, v in os.environ.items() if "GNNACCEL" not in k}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = forked.run(command, environment, ROOT)
    assert done.stdout == "[[0.0], [1.0]]\n"
    assert "DGL runs without acceleration: ImportError: gnnaccel's compiled library could not be loaded" in done.stderr


def test_disable_restores_everything():
    from dgl.backend.pytorch import sparse
    from dgl.heterograph_index import HeteroGraphIndex

    names = ("GSpMM", "GSDDMM", "EdgeSoftmax", "SegmentReduce", "GSpMM_hetero", "GSDDMM_hetero", "EdgeSoftmax_hetero")
    places = [(sparse, name) for name in names]
    places += [(dgl.ops, "gspmm"), (dglnn.GATConv, "forward"), (dgl.core, "invoke_edge_udf")]
    places += [(HeteroGraphIndex, "reverse"), (HeteroGraphIndex, "get_relation_graph"), (dgl.DGLGraph, "in_degrees")]
    before = [getattr(*place) for place in places]
    dgl_backend.enable()
    dgl_backend.enable()
    assert not any(getattr(*place) is old for place, old in zip(places, before, strict=True))
    dgl_backend.disable()
    assert [getattr(*place) for place in places] == before


def test_a_graph_used_while_enabled_serves_dgl_alone_and_back():
    g, x = graph(loops=True), rand(40, 3)
    for _ in range(2):
        dgl_backend.enable()
        out = dgl.ops.copy_u_max(g, x)
        dgl_backend.disable()
        torch.testing.assert_close(dgl.ops.copy_u_max(g, x), out)


def test_user_defined_functions_are_counted():
    g = graph(loops=True)

    def call(x):
        with g.local_scope():
            g.ndata["h"] = x
            g.update_all(lambda edges: {"m": edges.src["h"] * 2}, fn.sum("m", "a"))
            g.update_all(lambda edges: {"m": edges.src["h"].mul_(1)}, fn.sum("m", "a"))
            g.update_all(fn.copy_u("h", "m"), lambda nodes: {"b": nodes.mailbox["m"].sum(1)})
            g.update_all(fn.copy_u("h", "m"), lambda nodes: {"b": nodes.mailbox["m"].median(1)[0]})
            return g.ndata["a"], g.ndata["b"]

    counted = compare(call, [rand(40, 4)])
    for kind in ("message", "reduce"):
        site = counted[f"dgl.{kind} function"]
        assert site.accelerated == 1 and site.left == 1 and len(site.reasons) == 1
