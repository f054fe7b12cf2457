"""Forwards of PyG's layers that sum, from forward() straight to one op; after those of PyG 2.8.

Each maker takes the layer's class and its general forward(), which goes through propagate(), and which a call that is
in any way unusual takes. Where the layer adds a bias after its sum, or itself before, the op does that in its pass.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import ops, report
from gnnaccel.graph import hops, scales
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy.reduce import takes
from gnnaccel.lower import bounds
from gnnaccel.modules import is_watched
from gnnaccel.ops import linear_sums, messages
from gnnaccel.ops.joined_sums import GINE, joined_sum
from gnnaccel.ops.own_sum import own_sum, own_sum_mapped
from gnnaccel.pyg_backend import joined_forwards, mlps, norms, short
from gnnaccel.pyg_backend.call import note_outcome
from gnnaccel.pyg_backend.propagate import are_few
from gnnaccel.pyg_backend.rules import REDUCES
from gnnaccel.pyg_backend.touch import UNTOLD, kept_edges
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.pyg_backend.update_order import ALLOWED
from gnnaccel.touch import own_buffers, own_parameters, submodules


def _gcn(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GCNConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None):
        state, modules, parameters = self.__dict__, submodules(self), own_parameters(self)
        usual = (
            edge_weight is None and short.is_matrix(x) and x.dtype in norms.DTYPES and guard.allows(self, edge_index)
        )
        if not usual or not self.normalize or ALLOWED in state or "bias" not in parameters:
            return general(self, x, edge_index, edge_weight)
        edges, flow, cache = edge_index, self.flow, kept_edges(self)
        lin, bias = modules.get("lin"), parameters["bias"]
        maps = short.parameters_of(lin)
        alike = x.device == edge_index.device and (maps is not None or short.are_linear(lin))
        # Under autocast the map is narrow, and products with weights that are as wide as x are as wide again.
        narrow = torch.is_autocast_enabled(x.device.type)
        if not alike or (narrow and x.dtype != torch.float32) or cache is UNTOLD:
            return general(self, x, edge_index, edge_weight)
        if cache is not None:
            edges, weight = cache
            key, start = ("cached", x.shape[0], flow), time.perf_counter()
            constant = weight.dtype == x.dtype and not weight.requires_grad
            found = derived.get((weight, edges), key) if constant else None
            if found is None:
                graph = short.graph_of(edges, x.shape[0], x.shape[0], flow)
                fits = graph is not None and weight.dim() == 1 and weight.dtype == x.dtype
                if not fits or weight.shape[0] != graph.indices.shape[0]:
                    return general(self, x, edge_index, edge_weight)
                found = graph, norms.factors_of(graph, x, edges, weight, flow)
                if found[1] is not None:
                    derived.put((weight, edges), key, found)
            graph, scale = found
        elif self.cached or self.improved:
            return general(self, x, edge_index, edge_weight)
        else:
            found = short.normed(edge_index, x.shape[0], flow, self.add_self_loops, x.dtype)
            if found is None:
                return general(self, x, edge_index, edge_weight)
            start = time.perf_counter()
            graph, scale = found
        out = None
        if scale is not None and maps is not None and maps[1] is None:
            out = linear_sums.mapped_sum(graph, x, maps[0], scale, bias)
        if out is None and cache is not None:
            if narrow:
                return general(self, x, edge_index, edge_weight)
            out = norms.weighted_sum(graph, lin(x), edges, weight, flow, bias)
        elif out is None:
            out = norms.scaled_sum(graph, lin(x).to(x.dtype), scale, bias)
        report.record(guard.kind, start)
        return out

    return forward


def _sage(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.SAGEConv, tuple(REDUCES))

    @functools.wraps(general)
    def forward(self, x, edge_index, size=None):
        own = x[1] if type(x) is tuple and len(x) == 2 else x
        state, modules = self.__dict__, submodules(self)
        found = None
        if size is None and guard.allows(self, edge_index) and not self.project and ALLOWED not in state:
            found = neighbours(self, x, edge_index)
        if found is None or "lin_l" not in modules or (self.root_weight and "lin_r" not in modules):
            return general(self, x, edge_index, size)
        start = time.perf_counter()
        reduce, behind = REDUCES[type(modules["aggr_module"])], modules["lin_r"] if self.root_weight else None
        out = _sum_mapped(*found, reduce, modules["lin_l"], own, behind)
        report.record(guard.kind, start)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    return forward


def _graph_conv(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GraphConv, tuple(REDUCES))

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None, size=None):
        own = x[1] if type(x) is tuple and len(x) == 2 else x
        modules, found = submodules(self), None
        usual = size is None and (edge_weight is None or (takes(edge_weight) and edge_weight.dim() == 1))
        if usual and guard.allows(self, edge_index) and ALLOWED not in self.__dict__:
            found = neighbours(self, x, edge_index)
        if found is None or not modules.keys() >= {"lin_rel", "lin_root"} or not _fits(edge_weight, *found):
            return general(self, x, edge_index, edge_weight, size)
        start = time.perf_counter()
        reduce, lin = REDUCES[type(modules["aggr_module"])], modules["lin_rel"]
        out = _sum_mapped(*found, reduce, lin, own, modules["lin_root"], edge_weight)
        report.record(guard.kind, start)
        return out

    return forward


def _sum_mapped(
    graph: Graph, x: Tensor, reduce: str, lin: Any, own: Any, behind: Any, edge_weight: Tensor | None = None
) -> Tensor:
    """lin(sums of x over neighbours) + behind(own), without what is None."""
    behind = None if own is None else behind
    if edge_weight is None and behind is not None:
        maps, others = short.parameters_of(lin), short.parameters_of(behind)
        if maps is not None and others is not None and others[1] is None:
            out = linear_sums.sum_mapped(graph, x, reduce, *maps, others[0], None if own is x else own)
            if out is not None:
                return out
            narrow = linear_sums.narrow_dtype(x) if own is x else None
            if narrow is not None:  # rounded where that op rounds
                x = own = x.to(narrow)
    out = lin(ops.spmm(graph, x, edge_weight, reduce=reduce))
    if behind is None:
        return out
    is_part = own is x and graph.num_rows < x.shape[0]  # the rows of some graph's first nodes
    return out + behind(x[: graph.num_rows] if is_part else own)


def sage_rows(conv: Any, graph: Graph, hop: int, x: Tensor) -> Tensor:
    """What a SAGEConv without `project` says of the nodes before a hop of a sampled batch, of the features that it
    reads."""
    modules = submodules(conv)
    behind = modules["lin_r"] if conv.root_weight else None
    out = _sum_mapped(hops.head(graph, hop), x, REDUCES[type(modules["aggr_module"])], modules["lin_l"], x, behind)
    return F.normalize(out, p=2.0, dim=-1) if conv.normalize else out


def graph_conv_rows(conv: Any, graph: Graph, hop: int, x: Tensor) -> Tensor:
    """The same of a GraphConv without edge weights."""
    modules, head = submodules(conv), hops.head(graph, hop)
    return _sum_mapped(head, x, REDUCES[type(modules["aggr_module"])], modules["lin_rel"], x, modules["lin_root"])


def has_rows(conv: Any, x: Tensor) -> bool:
    """True for a GCNConv that `gcn_rows` knows."""
    parameters, maps = own_parameters(conv), short.parameters_of(submodules(conv).get("lin"))
    if maps is None or maps[1] is not None or "bias" not in parameters or kept_edges(conv) is not None:
        return False  # or somebody has put another map, bias or graph in the place of its own
    bias = parameters["bias"]
    fits = bias is None or (bias.dtype == x.dtype and bias.device == x.device and bias.shape == maps[0].shape[:1])
    return fits and x.dtype in norms.DTYPES and conv.normalize and not (conv.cached or conv.improved)


def gcn_rows(conv: Any, graph: Graph, hop: int, x: Tensor) -> Tensor:
    """The same of a GCNConv, whose degrees are those of the whole batch. Sums first: few of the nodes have edges."""
    head = hops.head(graph, hop)
    if conv.add_self_loops:
        scale, own = scales.looped_norm(graph, x.dtype)
    else:
        scale, own = scales.norm_scale(graph, x.dtype), None
    sums = ops.graph_conv(head, x, source_scale=scale[: head.num_cols], row_scale=scale[: head.num_rows])
    if own is not None:
        own = own[: head.num_rows].unsqueeze(1)
        # Of a node with a loop nothing is added: zero times infinity is not zero.
        sums = torch.addcmul(sums, x[: head.num_rows].masked_fill(own == 0, 0), own)
    return F.linear(sums, own_parameters(submodules(conv)["lin"])["weight"], own_parameters(conv)["bias"])


def has_sums(conv: Any, x: Tensor) -> bool:
    """True for a GINConv that `gin_rows` knows."""
    eps = _eps_of(conv)
    return "nn" in submodules(conv) and _is_one(eps) and eps.dtype == x.dtype and eps.device == x.device


def gin_rows(conv: Any, graph: Graph, hop: int, x: Tensor) -> Tensor:
    """What a GINConv maps of the nodes before a hop of a sampled batch, of the features that it reads."""
    head = hops.head(graph, hop)
    return _with_own(ops.spmm(head, x), x[: head.num_rows], _eps_of(conv))


def gin_sums(conv: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    """The same of all nodes."""
    eps = _eps_of(conv)
    looped = short.number(eps) == 0
    found = neighbours(conv, x, edge_index, looped)
    if found is None:
        return conv.propagate(edge_index, x=(x, x), size=None) + (1 + eps) * x
    return _gin_sum(*found, x, eps, looped)


def _eps_of(conv: Any) -> Any:
    return own_buffers(conv).get("eps", own_parameters(conv).get("eps"))


def _gin_sum(graph: Graph, source: Tensor, own: Tensor, eps: Tensor, looped: bool) -> Tensor:
    """Sums of `source` over neighbours, and (1 + eps) * own, which is in the graph if that is `looped`."""
    out = None if looped or own is not source else own_sum(graph, source, eps)
    if out is None:
        out = ops.spmm(graph, source)
        out = out if looped else _with_own(out, own, eps)
    return out


def _fits(edge_weight: Tensor | None, graph: Graph, x: Tensor) -> bool:
    if edge_weight is None:
        return True
    return edge_weight.shape[0] == graph.nnz and edge_weight.dtype == x.dtype and edge_weight.device == x.device


def _gin(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GINConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, size=None):
        own = x[1] if type(x) is tuple and len(x) == 2 else x
        modules, found = submodules(self), None
        eps, looped = _eps_of(self), False
        if size is None and guard.allows(self, edge_index) and "nn" in modules and _is_one(eps):
            # A layer's own feature that counts as much as a neighbour's is one more of these.
            looped = own is x and short.number(eps) == 0
            found = neighbours(self, x, edge_index, looped)
        if found is None or own is None or eps.device != own.device:
            return general(self, x, edge_index, size)
        start, (graph, source), narrow = time.perf_counter(), found, _narrow(modules["nn"], own)
        if eps.dtype != own.dtype and not (eps.dtype is torch.float32 and own.dtype is source.dtype is narrow):
            return general(self, x, edge_index, size)
        if own is source and narrow is not None:
            out = _mapped_sum(modules["nn"], graph, source, None if looped else eps, narrow)
            if out is not None:
                report.record(guard.kind, start)
                return out
            source = own = own.to(narrow)
        out = _gin_sum(graph, source, own, eps, looped)
        report.record(guard.kind, start)
        return mlps.mapped(modules["nn"], out)

    return forward


def _narrow(nn: Any, x: Tensor) -> torch.dtype | None:
    """Under autocast to bfloat16 that, where `nn`, which is given sums of x, would begin with a cast of these to it, as
    a linear map does; else None."""
    narrow = linear_sums.narrow_dtype(x)
    if narrow is None:
        return None
    while type(nn) in (torch.nn.Sequential, pyg_nn.MLP) and not short.hooked(nn):
        parts = nn if type(nn) is torch.nn.Sequential else nn.lins
        if not len(parts):
            return None
        nn = parts[0]
    return narrow if short.are_linear(nn) else None


def _mapped_sum(nn: Any, graph: Graph, x: Tensor, eps: Tensor | None, narrow: torch.dtype) -> Tensor | None:
    """nn(sums of x, and its own features unless without eps) under autocast, where `nn` is a linear map, or begins with
    one; else None. Without casts of maps torch's own function takes less."""
    rest: Sequence[Any] = ()
    if type(nn) is torch.nn.Sequential:
        nn, *rest = nn
    maps = short.parameters_of(nn)
    out = None if maps is None else own_sum_mapped(graph, x, eps, *maps, narrow)
    if out is not None:
        for part in rest:
            out = part(out)
    return out


def _is_one(eps: Any) -> bool:
    """True for a tensor of one number."""
    return type(eps) in short.FEATURES and eps.numel() == 1 and eps.dim() <= 1


def _with_own(out: Tensor, own: Tensor, eps: Tensor) -> Tensor:
    """out + (1 + eps) * own."""
    value = short.number(eps)
    if value is not None:
        return torch.add(out, own, alpha=1 + value)
    return torch.addcmul(out, own, 1 + (eps if eps.dtype is out.dtype else eps.view(())))  # of the dtype of the sums


def _gine(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GINEConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_attr=None, size=None):
        own = x[1] if type(x) is tuple and len(x) == 2 else x
        modules, found = submodules(self), None
        eps = _eps_of(self)
        usual = size is None and short.is_matrix(edge_attr) and guard.allows(self, edge_index)
        lin = modules.get("lin")
        usual = usual and _is_one(eps) and "nn" in modules and (lin is None or short.are_linear(lin))
        few = False
        if usual and short.is_matrix(own):
            graded = (lin is not None or edge_attr.requires_grad) and torch.is_grad_enabled()
            times = 1 if graded or edge_attr.is_cuda else bounds.COUNTS_UNGRADED
            few = are_few(self, plain, edge_index, {"x": own}, times=times)
        maps_pay = few and own.is_cpu and own.shape[0] >= bounds.MAPS_TOGETHER_ROWS
        if maps_pay and type(x) is not tuple and eps.is_cpu and eps.dtype == own.dtype:
            out = self.propagate(edge_index, x=(x, x), edge_attr=edge_attr, size=None)
            note_outcome(self, left=False)
            return mlps.mapped(modules["nn"], _with_own(out, own, eps))
        if usual and not few:
            found = neighbours(self, x, edge_index)
        unusual = found is None or own is None or eps.dtype != own.dtype or eps.device != own.device
        if not unusual and edge_attr.is_cuda:
            unusual = own.dtype == torch.float16 or not messages.is_fused(found[0])
        if unusual or torch.is_autocast_enabled(edge_attr.device.type):
            return general(self, x, edge_index, edge_attr, size)
        graph, source = found
        edge = edge_attr if lin is None else lin(edge_attr)
        if edge.shape != (graph.nnz, source.shape[1]) or edge.dtype != source.dtype:
            return general(self, x, edge_index, edge_attr, size)
        if own is source and edge.is_cuda:
            start = time.perf_counter()
            out = joined_sum(graph, source, (), source.shape[1], GINE, edge, eps)
            if out is not None:
                report.record(guard.kind, start)
                return mlps.mapped(modules["nn"], out)
        with report.accelerated(guard.kind):
            out = ops.message_reduce(graph, GINE.message, {"x": source, "edge": edge})
        return mlps.mapped(modules["nn"], _with_own(out, own, eps))

    return forward


def _res_gated(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.ResGatedGraphConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_attr=None):
        source, own = x if type(x) is tuple and len(x) == 2 else (x, x)
        modules, parameters, found = submodules(self), own_parameters(self), None
        maps = [modules.get(name) for name in ("lin_key", "lin_query", "lin_value")]
        usual = edge_attr is None and self.edge_dim is None
        usual = usual and (guard.allows(self, edge_index) or guard.allows_matrix(self, edge_index))
        if usual and short.is_matrix(source) and source.is_cpu and source.shape[1]:
            times = bounds.COUNTS_GATES * self.out_channels / source.shape[1]
            usual = not are_few(self, plain, edge_index, {"x": source}, times=times)
        if usual and "bias" in parameters and short.are_linear(*maps):
            act = modules.get("act")
            if type(act) is torch.nn.Sigmoid and not is_watched(act) and own is not None:
                found = neighbours(self, (source, own), edge_index)
        # Where gates are stored it is as long as PyG's messages may be; beyond that they are made again in blocks.
        alike = found is not None and source.dtype == own.dtype
        if not alike or torch.is_autocast_enabled(source.device.type) or not _stores(self, *found):
            return general(self, x, edge_index, edge_attr)
        if own is source and source.is_cuda:
            out = joined_forwards.gates(self, guard.kind, found[0], source)
            if out is not None:
                return out
        key, query, value = maps[0](own), maps[1](source), maps[2](source)
        start = time.perf_counter()
        out = ops.gated_sum(found[0], query, key, value)
        report.record(guard.kind, start)
        bias = parameters["bias"]
        if self.root_weight:
            skip = modules["lin_skip"]
            if bias is not None and type(skip) is pyg_nn.Linear and skip.bias is None and not is_watched(skip):
                return out + F.linear(own, skip.weight, bias)  # the bias costs no pass of its own there
            out = out + skip(own)
        return out if bias is None else out + bias

    return forward


def _stores(conv: Any, graph: Graph, x: Tensor) -> bool:
    """True if a tensor with a row of the layer's width for each edge may be kept, or need not be."""
    if ops.messages.is_fused(graph) and x.dtype != torch.float16:
        return True
    return graph.nnz * conv.out_channels * x.element_size() <= bounds.STORED_BYTES.get(x.device.type, 0)


def neighbours(conv: Any, x: Any, edge_index: Tensor, looped: bool = False) -> tuple[Graph, Tensor] | None:
    """The graph and the features that a sum over sources reads; None where they are not plain matrices. `looped`: with
    one more loop at each node, of features that are those of sources and destinations."""
    source, own = x if type(x) is tuple and len(x) == 2 else (x, x)
    if not short.is_matrix(source):
        return None
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided:
        graph = short.graph_of_matrix(edge_index, source, own) if short.is_matrix(own) else None
        return None if graph is None else (graph, source)
    if source.device != edge_index.device:
        return None
    if looped:
        graph = short.looped(edge_index, source.shape[0], conv.flow, "more")
    elif own is source:
        graph = short.graph_of(edge_index, source.shape[0], source.shape[0], conv.flow)
    elif not short.is_matrix(own) or own.device != source.device or conv.flow != "source_to_target":
        return None
    else:
        graph = short.graph_of(edge_index, source.shape[0], own.shape[0], conv.flow)
    return None if graph is None else (graph, source)


_MAKERS = (
    (pyg_nn.GCNConv, _gcn),
    (pyg_nn.SAGEConv, _sage),
    (pyg_nn.GraphConv, _graph_conv),
    (pyg_nn.GINConv, _gin),
    (pyg_nn.GINEConv, _gine),
    (pyg_nn.ResGatedGraphConv, _res_gated),
)
FORWARDS: dict[Callable, Callable] = {layer.forward: maker for layer, maker in _MAKERS}
"""forward() of a layer of PyG's -> what makes a short one of a class that has it, and of its general one."""
short.know(*(layer for layer, _ in _MAKERS))
