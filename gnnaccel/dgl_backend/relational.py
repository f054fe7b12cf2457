"""RelGraphConv, GatedGraphConv of several types: one sum over the edges of all relations, without a message or a matrix
for any edge. HGTConv: sources mapped once for each relation that they have, and one attention over all edges."""

from __future__ import annotations

import torch

from gnnaccel import ops, report
from gnnaccel.dgl_backend.convolutions import structure_of
from gnnaccel.dgl_backend.ops import OUT_OF_RANGE
from gnnaccel.dgl_backend.touch import out_features, steps
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.modules import is_watched


def rel_graph_forward(original):
    """RelGraphConv.forward that calls `ops.relational_spmm` where the layer is a plain one."""

    def forward(self, g, feat, etypes, norm=None, *, presorted=False):
        structure_ = _structure_of(g, feat)
        if structure_ is None or not _is_plain(self, feat):
            return original(self, g, feat, etypes, norm, presorted=presorted)
        scale = norm if norm is not None else g.edata.get("norm")  # which the layer's message looks for
        if not _are_of_edges(structure_, feat, etypes, scale):
            return original(self, g, feat, etypes, norm, presorted=presorted)
        self.presorted = presorted
        try:
            with report.accelerated("dgl.RelGraphConv"):
                h = _sum(self.linear_r, structure_, feat, etypes, scale)
        except IndexError:
            report.fallback("dgl.RelGraphConv", OUT_OF_RANGE)
            return original(self, g, feat, etypes, norm, presorted=presorted)
        if self.layer_norm:
            h = self.layer_norm_weight(h)
        if self.bias:
            h = h + self.h_bias
        if self.self_loop:
            h = h + feat[: g.num_dst_nodes()] @ self.loop_weight
        if self.activation:
            h = self.activation(h)
        return self.dropout(h)

    return forward


def gated_graph_forward(original):
    """GatedGraphConv.forward that calls `ops.relational_spmm` where there are several edge types, or one is given."""

    def forward(self, graph, feat, etypes=None):
        structure_ = None if etypes is None or not graph.is_homogeneous else _structure_of(graph, feat)
        if structure_ is None or not _is_plain_gated(self, feat) or not _are_of_edges(structure_, feat, etypes, None):
            return original(self, graph, feat, etypes)
        degrees = _degrees(structure_, etypes, len(self.linears), feat.dtype)
        if degrees is None:
            report.fallback("dgl.GatedGraphConv", "types out of range")
            return original(self, graph, feat, etypes)
        counts, met = degrees
        lins = [(lin.weight, lin.bias) for lin in self.linears]
        lins = [lin if has else (lin[0].detach(), lin[1].detach()) for lin, has in zip(lins, met, strict=True)]
        weight, bias = torch.stack([w.t() for w, _ in lins]), torch.stack([b for _, b in lins])
        x = torch.cat([feat, feat.new_zeros(feat.shape[0], out_features(self) - feat.shape[1])], -1)
        for _ in range(steps(self)):
            with report.accelerated("dgl.GatedGraphConv"):
                sums = torch.addmm(ops.relational_spmm(structure_, x, etypes, weight), counts, bias)
            x = self.gru(sums, x)
        return x

    return forward


def _is_plain_gated(layer, feat) -> bool:
    """True for linear maps of DGL's, in the dtype of the features, which fit."""
    lins = list(layer.linears)
    if any(type(lin) is not torch.nn.Linear or is_watched(lin) or lin.bias is None for lin in lins):
        return False
    given = [t for lin in lins for t in (lin.weight, lin.bias)]
    alike = all(type(t) in _TENSORS and t.dtype == feat.dtype and t.device == feat.device for t in given)
    return alike and feat.dim() == 2 and feat.dtype in _DTYPES and feat.shape[1] <= out_features(layer)


def _degrees(graph: Graph, etypes, types: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[bool]] | None:
    """How many edges of each type a node receives [num_rows, types], and which types there are; None for a type out of
    range. Kept with the edges' types."""
    key = ("degrees by type", types, dtype)
    found = derived.get((etypes, graph.indptr), key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():
            if not 0 <= int(etypes.min()) <= int(etypes.max()) < types:
                return None
            rows = torch.repeat_interleave(graph.indptr.diff().long())
            kinds = etypes if graph.edge_ids is None else etypes[graph.edge_ids.long()]
            counts = torch.bincount(rows * types + kinds, minlength=graph.num_rows * types).view(-1, types)
            found = counts.to(dtype), counts.any(0).tolist()
        derived.put((etypes, graph.indptr), key, found)
    return found


def hgt_forward(original):
    """HGTConv.forward that calls `ops.relational_attention` where the layer is a plain one."""

    def forward(self, g, x, ntype, etype, *, presorted=False):
        graph = _structure_of(g, x)
        if graph is None or not _is_plain_hgt(self, x) or not _are_of_edges(graph, x, etype, None):
            return original(self, g, x, ntype, etype, presorted=presorted)
        if not g.is_block and graph.num_rows != graph.num_cols:  # DGL words the error
            return original(self, g, x, ntype, etype, presorted=presorted)
        self.presorted = presorted
        own, own_types = (x[: g.num_dst_nodes()], ntype[: g.num_dst_nodes()]) if g.is_block else (x, ntype)
        shape = (-1, self.num_heads, self.head_size)
        key, value = (lin(x, ntype, presorted).view(shape) for lin in (self.linear_k, self.linear_v))
        query = self.linear_q(own, own_types, presorted).view(shape)
        try:
            with report.accelerated("dgl.HGTConv"):
                maps = [torch.stack([lin.W for lin in part], 1) for part in (self.relation_att, self.relation_msg)]
                prior = torch.stack(list(self.relation_pri), 1)
                h = ops.relational_attention(graph, query, key, value, etype, *maps, prior)
        except IndexError:
            report.fallback("dgl.HGTConv", OUT_OF_RANGE)
            return original(self, g, x, ntype, etype, presorted=presorted)
        h = self.drop(self.linear_a(h.view(-1, self.num_heads * self.head_size), own_types, presorted))
        alpha = torch.sigmoid(self.skip[own_types]).unsqueeze(-1)
        h = h * alpha + (own if own.shape == h.shape else own @ self.residual_w) * (1 - alpha)
        return self.norm(h) if self.use_norm else h

    return forward


def _is_plain_hgt(layer, x) -> bool:
    """True for a layer of DGL's with DGL's own messages and maps, in the dtype of the features."""
    from dgl.nn.pytorch import HGTConv, TypedLinear

    if type(layer) is not HGTConv or "message" in vars(layer) or x.dim() != 2:
        return False
    maps = [*layer.relation_att, *layer.relation_msg]
    if any(type(lin) is not TypedLinear or lin.regularizer is not None or is_watched(lin) for lin in maps):
        return False
    given = [*(lin.W for lin in (*maps, layer.linear_k, layer.linear_q, layer.linear_v)), *layer.relation_pri]
    alike = all(type(t) in _TENSORS and t.dtype == x.dtype and t.device == x.device for t in given)
    return alike and x.dtype in _DTYPES


_TENSORS = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.float64)


def _structure_of(g, feat) -> Graph | None:
    """As `structure_of`; None also for a graph without edges, of which DGL warns where a layer's message is its own."""
    graph = structure_of(g, (feat,)) if type(feat) in _TENSORS else None
    return graph if graph is not None and graph.nnz else None


def _is_plain(layer, feat) -> bool:
    """True for a layer of DGL's with DGL's own messages and maps, in the dtype of the features."""
    from dgl.nn.pytorch import RelGraphConv, TypedLinear

    lin = layer.linear_r
    if type(layer) is not RelGraphConv or "message" in vars(layer) or type(lin) is not TypedLinear or is_watched(lin):
        return False
    given = [lin.W, lin.coeff] if lin.regularizer == "basis" else [lin.W]
    alike = all(type(t) in _TENSORS and t.dtype == feat.dtype and t.device == feat.device for t in given)
    return alike and feat.dim() == 2 and feat.shape[1] == lin.in_size and feat.dtype in _DTYPES


def _are_of_edges(graph: Graph, feat, etypes, norm) -> bool:
    if type(etypes) is not torch.Tensor or etypes.dtype not in (torch.int64, torch.int32):
        return False
    if etypes.shape != (graph.nnz,) or etypes.device != graph.device:
        return False
    if norm is None:
        return True
    alike = type(norm) in _TENSORS and norm.dtype == feat.dtype and norm.device == feat.device
    return alike and norm.shape == (graph.nnz, 1)


def _sum(lin, graph: Graph, feat, etypes, norm):
    weight, coefficients = lin.W, None
    if lin.regularizer == "bdd":
        weight = weight.view(lin.num_types, lin.num_bases, lin.submat_in, lin.submat_out)
    elif lin.regularizer == "basis":
        coefficients = lin.coeff
    norm = None if norm is None else norm.squeeze(1)
    return ops.relational_spmm(graph, feat, etypes, weight, coefficients, norm)
