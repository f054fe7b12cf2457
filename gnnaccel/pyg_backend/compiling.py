"""Layers inside torch.compile: what they do between their linear maps, by ops on the user's own edge_index.

While torch.compile reads a layer, nothing may be looked up, as what it finds becomes a constant of the program. So the
ops here take a `Described`, which names the edges and what the layer makes of them (loops); the graph is looked up, and
made where there is none, each time the program runs. A GCN's norm is two factors of each node, made of its degree.

Only edges that the program was given are taken. Those that it makes itself are left to PyG's code: Inductor may write
other edges into their memory, of which nobody tells.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn.conv import MessagePassing

from gnnaccel import _operators, report, touch
from gnnaccel.lazy.reduce import FEATURE_DTYPES
from gnnaccel.lower import bounds, choose
from gnnaccel.ops import _packed
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops._described import Described
from gnnaccel.ops._edge_factor import FUSED_DTYPES
from gnnaccel.ops.dot_attention import dot_attention_op
from gnnaccel.ops.edge_softmax import edge_softmax_op
from gnnaccel.ops.sddmm import sddmm_op
from gnnaccel.ops.spmm import max_min_op, spmm_op
from gnnaccel.pyg_backend.graph import INDEX_DTYPES, unserved
from gnnaccel.pyg_backend.rules import REDUCES, WEIGHTS
from gnnaccel.pyg_backend.touch import UNSEEN, collects_otherwise, user_args
from gnnaccel.pyg_backend.touch import nn as pyg_nn

comptime = touch.comptime()
FEATURES = (Tensor, torch.nn.Parameter)
_METHODS = ("message", "aggregate", "update", "message_and_aggregate", "edge_updater", "edge_update")


def compiling() -> bool:
    """True while torch.compile reads the code, which is not to be exported: an exported program is PyG's own."""
    return torch.compiler.is_dynamo_compiling() and _takes_ops()


@torch.compiler.assume_constant_result
def _takes_ops() -> bool:
    _operators.define_twins()
    return not getattr(torch.compiler, "is_exporting", bool)()


class _Seen(threading.local):
    """What `_look` has found on this thread."""

    given = False
    replayed = False


_seen = _Seen()


def _look(context: Any) -> None:
    """While torch.compile reads `is_given`: whether `edges` is an input of the program, as it was given; and whether
    the program is to run from CUDA graphs."""
    try:
        node = context.get_local("edges").as_proxy().node
        example = node.meta["example_value"]
        _seen.given = node.op in ("placeholder", "get_attr") and example._version == 0
        _seen.replayed = _replays(context)
    except Exception:  # parts of torch that may change: what they do not tell is left to PyG
        _seen.given = False
    if _seen.replayed and not _operators.CAN_LOOK_UP:  # our ops would be recorded with the edges of that call
        _seen.given = False


def _replays(context: Any) -> bool:
    """True if the backend makes CUDA graphs of the programs that it is given: modes "reduce-overhead", "max-autotune"
    of Inductor, or its setting."""
    settings = getattr(touch.backend_of(context), "get_compiler_config", None)
    return settings is not None and bool(settings()["triton.cudagraphs"])


@torch.compiler.assume_constant_result
def _found_given() -> bool:
    return _seen.given


def is_given(edges: Tensor) -> bool:
    """True for edges that the compiled program is given, and has not written into."""
    if comptime is None:
        return False
    comptime(_look)
    return _found_given()


@torch.compiler.assume_constant_result
def _found_replayed(device: str) -> bool:
    return _seen.replayed and device == "cuda"


def graph_of(edges: Tensor, num_src: int, num_dst: int, loops: str = "none", flipped: bool = False) -> Any:
    """What our ops take for `edges` that `takes_edges` has said yes to: as `Described` has the arguments.

    In a program of CUDA graphs the values of the graph, unless it is large, where the time of the host does not count.
    """
    described = Described(edges, num_src, num_dst, loops, flipped)
    if _found_replayed(edges.device.type) and described.nnz <= bounds.PACKED_EDGES:
        return _packed.structure_of(described, torch.is_grad_enabled())
    return described


@torch.compiler.assume_constant_result
def counted(kind: str) -> bool:
    """Counts a layer once per compilation."""
    report.count(kind)
    return True


@torch.compiler.assume_constant_result
def _served(device: str) -> bool:
    return unserved(torch.device(device)) is None


@torch.compiler.assume_constant_result
def _watched() -> bool:
    """Hooks of all modules: torch.compile does not look at them either, but compiles other programs with them."""
    return bool(touch.has_global_hooks())


def is_matrix(x: Any, edge_index: Tensor) -> bool:
    return (
        type(x) in FEATURES
        and x.dim() == 2
        and x.dtype in FEATURE_DTYPES
        and x.layout is torch.strided
        and x.device == edge_index.device
        and (x.dtype is not torch.float16 or x.is_cuda)
        and not torch.is_autocast_enabled(x.device.type)
    )


def takes_edges(edge_index: Any) -> bool:
    return (
        type(edge_index) is Tensor
        and edge_index.layout is torch.strided
        and edge_index.dtype in INDEX_DTYPES
        and edge_index.dim() == 2
        and edge_index.shape[0] == 2
        and _served(edge_index.device.type)
        and is_given(edge_index)
    )


def is_as_made(conv: Any, plain: Any) -> bool:
    """True if no method that our ops stand for was replaced on the layer, and PyG would run the layer itself."""
    if UNSEEN or conv.explain or conv.decomposed_layers > 1 or conv.aggr_module is None or _watched():
        return False
    for name in _METHODS:
        if name in conv.__dict__:
            return False
        getattr(conv, name)  # of which torch.compile makes a guard, as it does not of the line above
    return plain.aggregate is MessagePassing.aggregate and plain.update is MessagePassing.update


def is_quiet(module: Any) -> bool:
    return not touch.has_forward_hooks(module)


def is_weight(weight: Any, x: Any, edge_index: Tensor) -> bool:
    return (
        type(weight) in FEATURES
        and weight.dim() == 1
        and weight.shape[0] == edge_index.shape[1]
        and weight.dtype == x.dtype
        and weight.device == x.device
    )


def dropped(conv: Any, like: Tensor, graph: Described | Structure) -> Tensor | None:
    """What dropout multiplies the weights [E, H] by; None for ones."""
    if not (conv.dropout > 0 and conv.training):
        return None
    return F.dropout(like.new_ones(graph.nnz, like.shape[1]), p=conv.dropout)


def summed(graph: Described | Structure, scores: Tensor, x: Tensor, factor: Tensor | None) -> Tensor:
    """Sources weighted by the softmax of scores [nnz, H], times `factor`."""
    if not x.is_cuda:
        return dot_attention_op(graph, None, None, x, scores, factor, None, 0.0, 1.0)[0]
    weight = edge_softmax_op(graph, scores)
    weight = weight if factor is None else weight * factor
    return spmm_op(graph, x, weight.unsqueeze(-1), "mul", "sum", 0.0)


def dotted(
    graph: Described | Structure, query: Tensor, key: Tensor, value: Tensor, factor: Tensor | None, scale: float
) -> Tensor:
    if value.is_cuda and value.shape[2] * value.element_size() > bounds.DOT_HEAD_BYTES:
        return summed(graph, sddmm_op(graph, key, query * scale, "dot", "u", "v").squeeze(-1), value, factor)
    return dot_attention_op(graph, query, key, value, None, factor, None, 0.0, scale)[0]


def _are_few(edges: Tensor, x: Any) -> bool:
    """True for sums of so few numbers, in a program of CUDA graphs, that Inductor's own kernels, which look nothing up
    when the program runs, take less of the host's time and no more of the GPU's: a step of SAGE on Cora 1.04 ms, with
    ours 1.17 (H100, torch 2.11).

    Left out as in `propagate.are_few`: int32, of which torch's scatters have wrong gradients, and sums whose order
    somebody has asked for.
    """
    if not _found_replayed(edges.device.type) or edges.dtype is not torch.int64:
        return False
    x = x[0] if type(x) is tuple else x
    if type(x) not in FEATURES or x.dim() != 2:
        return False
    return choose.are_few(device=edges.device.type, edges=edges.shape[1], width=x.shape[-1], compiled=True)


def propagate(conv: Any, plain: Any, kind: str, edge_index: Any, kwargs: dict) -> Tensor | None:
    """propagate() of a layer that is being compiled; None where PyG's code is to be read."""
    is_dot = plain.message is pyg_nn.TransformerConv.message
    reduce = REDUCES.get(type(conv.aggr_module)) if is_dot or plain.message in WEIGHTS else None
    if reduce is None or not takes_edges(edge_index):
        return None
    x, size, name = kwargs.get("x"), kwargs.get("size"), None if is_dot else WEIGHTS[plain.message]
    weight: Any = None if name is None else kwargs.get(name)
    if weight is None and reduce in ("sum", "mean") and not is_dot and _are_few(edge_index, x):
        return None
    if collects_otherwise(plain) or not is_as_made(conv, plain) or not is_quiet(conv.aggr_module):
        return None
    if is_dot:
        return _transformer(conv, kind, edge_index, **kwargs) if reduce == "sum" else None
    pair: Any = (x, x) if type(x) in FEATURES else x
    if size is not None or type(pair) is not tuple or len(pair) != 2 or pair[1] is None:
        return None
    source, target = pair
    if conv.node_dim not in (-2, 0) or not is_matrix(source, edge_index):
        return None
    if target is not source and (not is_matrix(target, edge_index) or conv.flow != "source_to_target"):
        return None
    for other in user_args(conv):  # what else the layer would bring to the edges counts for the sizes
        if other[-2:] in ("_i", "_j") and other != "x_j":
            return None
    if weight is not None and not is_weight(weight, source, edge_index):
        return None
    counted(kind)
    graph = graph_of(edge_index, source.shape[0], target.shape[0], "none", conv.flow != "source_to_target")
    weight, message = (None, "copy_lhs") if weight is None else (weight.view(-1, 1), "mul")
    if reduce in ("sum", "mean"):
        return spmm_op(graph, source, weight, message, reduce, 0.0)
    return max_min_op(graph, source, weight, message, reduce, 0.0, False)[0]


def _transformer(conv, kind, edge_index, query=None, key=None, value=None, edge_attr=None, size=None) -> Tensor | None:
    heads = (query, key, value)
    if edge_attr is not None or size is not None or conv.flow != "source_to_target" or conv.node_dim != 0:
        return None
    if conv.lin_edge is not None:
        return None
    for x in heads:
        if type(x) is not Tensor or x.dim() != 3 or x.dtype is not value.dtype or x.device != edge_index.device:
            return None
    if query.shape[1:] != value.shape[1:] or key.shape != value.shape:  # of a layer of somebody's own
        return None
    if value.dtype not in FUSED_DTYPES[value.device.type] or torch.is_autocast_enabled(value.device.type):
        return None
    counted(kind)
    graph = graph_of(edge_index, value.shape[0], query.shape[0])
    return dotted(graph, query, key, value, dropped(conv, value, graph), conv.out_channels**-0.5)
