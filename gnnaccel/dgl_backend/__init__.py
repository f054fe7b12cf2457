"""The DGL plug-in: `shim` makes DGL importable, `enable` puts our ops under its message passing.

All message passing of DGL, its own layers and user code alike, ends in a handful of autograd classes that
dgl.backend.pytorch.sparse looks up by name at each call; `enable` replaces those names.
"""

from __future__ import annotations

import functools
import types

from gnnaccel.dgl_backend.compat import KERNELS, guard_sampling, shim

__all__ = ["disable", "enable", "forget", "guard_sampling", "shim", "to_graph"]

_undo: list[tuple[object, str, object]] = []  # (holder, attribute, what was there), in order of replacement
_INHERITED = object()  # in place of what was there: the holder had it from a base class


def __getattr__(name: str):
    # Late, as it needs the binary: DGL must be importable, and its sampling right, without.
    if name in ("forget", "to_graph"):
        from gnnaccel.dgl_backend import structure

        return getattr(structure, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _replace(holder, name: str, value) -> None:
    found = vars(holder).get(name, _INHERITED)
    _undo.append((holder, name, found))
    if isinstance(found, types.FunctionType) and isinstance(value, types.FunctionType):
        functools.update_wrapper(value, found, updated=())  # errors of a call, and help(), name DGL's function
    setattr(holder, name, value)


def enable() -> None:
    """Run DGL's message passing on gnnaccel's ops. Imports DGL; does nothing when already enabled.

    With GNNACCEL_DGL_KERNELS=torch: on torch's own kernels, which is what `gnnaccel compare` measures ours against
    where DGL was built without CUDA. ValueError for another value of it.
    """
    if _undo:
        return
    import os
    import sys

    import dgl
    from dgl import core
    from dgl.backend.pytorch import sparse
    from dgl.heterograph_index import HeteroGraphIndex
    from dgl.nn.pytorch import (
        AGNNConv,
        DotGatConv,
        EdgeGATConv,
        GATConv,
        GatedGraphConv,
        GATv2Conv,
        GINConv,
        GraphConv,
        HeteroGraphConv,
        HGTConv,
        RelGraphConv,
        SAGEConv,
        TypedLinear,
    )

    from gnnaccel.dgl_backend import (
        bridge,
        convolutions,
        hetero,
        hetero_conv,
        messages,
        nn,
        ops,
        relational,
        samplers,
        short,
        stacked,
        structure,
        subgraphs,
        typed,
    )
    from gnnaccel.dgl_backend import our_kernels as ours
    from gnnaccel.dgl_backend import torch_kernels as torchs

    guard_sampling()
    kernels = os.environ.get(KERNELS, "")
    if kernels not in ("", "torch"):
        raise ValueError(f"{KERNELS}={kernels} is not understood: expected torch")
    ops.kernels = torchs if kernels == "torch" else ours
    if bridge.needed():
        for holder, name, value in bridge.replacements():
            _replace(holder, name, value)
    functions = {
        "GSpMM": ops.spmm,
        "GSDDMM": ops.sddmm,
        "EdgeSoftmax": ops.edge_softmax,
        "SegmentReduce": ops.segments,
        "GSpMM_hetero": hetero.spmm,
        "GSDDMM_hetero": hetero.sddmm,
        "EdgeSoftmax_hetero": hetero.edge_softmax,
    }
    for name, function in functions.items():
        _replace(sparse, name, ops.Replacement(function, getattr(sparse, name)))
    mean = ops.mean_gspmm(dgl.ops.gspmm)
    for holder in (dgl.ops, sys.modules["dgl.ops.spmm"]):
        _replace(holder, "gspmm", mean)
    softmax = sys.modules["dgl.ops.edge_softmax"]
    _replace(softmax, "edge_softmax_internal", short.edge_softmax(softmax.edge_softmax_internal))
    for layer in nn.layers_that_check_degrees():
        _replace(layer, "forward", nn.checked_once(layer.forward))
        _replace(layer, nn.ALLOWS, nn.allowance)
    if ops.kernels is ours:
        forwards = {
            AGNNConv: nn.agnn_forward,
            DotGatConv: nn.dotgat_forward,
            EdgeGATConv: nn.edge_gat_forward,
            GatedGraphConv: relational.gated_graph_forward,
            GATConv: nn.gat_forward,
            GATv2Conv: nn.gatv2_forward,
            GINConv: convolutions.gin_forward,
            GraphConv: convolutions.conv_forward,
            HGTConv: relational.hgt_forward,
            RelGraphConv: relational.rel_graph_forward,
            SAGEConv: convolutions.sage_forward,
            TypedLinear: typed.typed_linear_forward,
        }
        for layer, forward in forwards.items():
            _replace(layer, "forward", forward(layer.forward))
        products = {"segment_mm": typed.segment_mm, "gather_mm": typed.gather_mm}
        for name, function in products.items():
            product = function(getattr(dgl.ops, name))
            module = sys.modules["dgl.ops.segment" if name == "segment_mm" else "dgl.ops.gather_mm"]
            for holder in (dgl.ops, module, sys.modules[TypedLinear.__module__]):
                _replace(holder, name, product)
    for name in ("zerocopy_to_dgl_ndarray", "zerocopy_to_dlpack"):  # they hand on addresses
        _replace(dgl.backend, name, _of_dense(getattr(dgl.backend, name)))
    memoised = {"get_relation_graph": structure.relation_graph, "reverse": structure.reversed_index}
    for name, function in memoised.items():
        _replace(HeteroGraphIndex, name, _method(function, getattr(HeteroGraphIndex, name)))
    for name in ("in_degrees", "out_degrees"):
        _replace(dgl.DGLGraph, name, structure.degrees(getattr(dgl.DGLGraph, name), name))
    for name, function in {"update_all": short.update_all, "apply_edges": short.apply_edges}.items():
        _replace(dgl.DGLGraph, name, function(getattr(dgl.DGLGraph, name)))
    if ops.kernels is ours:
        method = stacked.multi_update_all(dgl.DGLGraph.multi_update_all)
        _replace(dgl.DGLGraph, "multi_update_all", method)
        _replace(HeteroGraphConv, "forward", hetero_conv.forward(HeteroGraphConv.forward))
    sampler = dgl.dataloading.NeighborSampler
    _replace(sampler, "sample_blocks", samplers.sample_blocks(sampler.sample_blocks))
    sampler = dgl.dataloading.LaborSampler
    _replace(sampler, "sample_blocks", samplers.leave_to_dgl(sampler.sample_blocks, "dgl.LaborSampler"))
    makers = {"ShaDowKHopSampler": subgraphs.shadow_sample, "SAINTSampler": subgraphs.saint_sample}
    for name, function in makers.items():
        sampler = getattr(dgl.dataloading, name)
        _replace(sampler, "sample", function(sampler.sample))
    between = subgraphs.node_subgraph(dgl.node_subgraph)
    for holder in (dgl, dgl.subgraph):
        _replace(holder, "node_subgraph", between)
    _replace(dgl.DGLGraph, "subgraph", subgraphs.node_subgraph(dgl.DGLGraph.subgraph))  # which has its own help()
    if ops.kernels is ours:
        originals = messages.Originals(*(getattr(core, name) for name in messages.Originals._fields))
        _replace(core, "invoke_edge_udf", messages.edge_function(originals))
        _replace(core, "message_passing", messages.message_passing(originals))
    else:
        for name, what in (("invoke_edge_udf", "message"), ("invoke_udf_reduce", "reduce")):
            _replace(core, name, _counted(getattr(core, name), what))


def is_enabled() -> bool:
    """True between `enable` and `disable`."""
    return bool(_undo)


def _of_dense(function):
    """`function` of a tensor, which gets the dense one of a CBSR."""
    from gnnaccel.ops import CBSR

    return lambda data: function(data.to_dense() if isinstance(data, CBSR) else data)


def _method(function, original):
    """A method that calls function(original, self, ...)."""
    return lambda self, *args: function(original, self, *args)


def _counted(function, what: str):
    """A user-defined function's call, counted as left to DGL."""
    from gnnaccel import report

    def call(*args, **kwargs):
        report.fallback(f"dgl.{what} function", f"a user-defined {what} function runs as DGL runs it")
        return function(*args, **kwargs)

    return call


def disable() -> None:
    """Put back everything `enable` replaced."""
    if _undo:
        from gnnaccel.dgl_backend.block_index import make_all

        make_all()
    while _undo:
        holder, name, value = _undo.pop()
        if value is _INHERITED:
            delattr(holder, name)
        else:
            setattr(holder, name, value)
