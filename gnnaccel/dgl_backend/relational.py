"""RelGraphConv: one sum over the edges of all relations, without a message or a matrix for any edge."""

from __future__ import annotations

import torch

from gnnaccel import ops, report
from gnnaccel.dgl_backend.convolutions import structure_of
from gnnaccel.graph.csr import Graph
from gnnaccel.modules import is_watched


def rel_graph_forward(original):
    """RelGraphConv.forward that calls `ops.relational_spmm` where the layer is a plain one."""

    def forward(self, g, feat, etypes, norm=None, *, presorted=False):
        structure_ = structure_of(g, (feat,)) if type(feat) in _TENSORS else None
        if structure_ is None or not _is_plain(self, feat):
            return original(self, g, feat, etypes, norm, presorted=presorted)
        scale = norm if norm is not None else g.edata.get("norm")  # which the layer's message looks for
        if not _are_of_edges(structure_, feat, etypes, scale):
            return original(self, g, feat, etypes, norm, presorted=presorted)
        self.presorted = presorted
        with report.accelerated("dgl.RelGraphConv"):
            h = _sum(self.linear_r, structure_, feat, etypes, scale)
        if self.layer_norm:
            h = self.layer_norm_weight(h)
        if self.bias:
            h = h + self.h_bias
        if self.self_loop:
            h = h + feat[: g.num_dst_nodes()] @ self.loop_weight
        if self.activation:
            h = self.activation(h)
        return self.dropout(h)

    forward.__doc__ = original.__doc__
    return forward


_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _is_plain(layer, feat) -> bool:
    """True for a layer of DGL's with DGL's own messages and maps, in the dtype of the features."""
    from dgl.nn.pytorch import RelGraphConv, TypedLinear

    lin = layer.linear_r
    if type(layer) is not RelGraphConv or "message" in vars(layer) or type(lin) is not TypedLinear or is_watched(lin):
        return False
    given = [lin.W, lin.coeff] if lin.regularizer == "basis" else [lin.W]
    alike = all(type(t) in _TENSORS and t.dtype == feat.dtype and t.device == feat.device for t in given)
    return alike and feat.dim() == 2 and feat.shape[1] == lin.in_size and feat.dtype in (torch.float32, torch.float64)


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
