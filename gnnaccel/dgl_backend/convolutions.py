"""The convolutions of dgl.nn that sum up features of neighbours, and when a layer's call is a plain one.

GraphConv: norms, sum, bias and ReLU in one pass. SAGEConv and GINConv: their sums without DGL's frames around them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from gnnaccel import ops, report
from gnnaccel.dgl_backend.ops import unsupported
from gnnaccel.dgl_backend.short import autocasting, copied, is_plain
from gnnaccel.dgl_backend.structure import degrees_and_one, known_structure, norm, structure
from gnnaccel.dgl_backend.touch import (
    allows_zero_in_degree,
    conv_activation,
    conv_norm,
    gin_kind,
    in_features,
    index_of,
    out_features,
    sage_kind,
    sage_widths,
)
from gnnaccel.graph.csr import Graph
from gnnaccel.modules import is_as_made, is_watched
from gnnaccel.ops import linear_sums
from gnnaccel.ops.normed_layers import normed_by


def plain(layer, graph, features) -> bool:
    """True for a call without anything that a layer's own forward, on our SDDMM, edge softmax and SpMM, should see to:
    what `structure_of` looks at, and nodes without in-edges that the layer refuses."""
    structure_ = structure_of(graph, features)
    return structure_ is not None and (allows_zero_in_degree(layer) or structure_.no_empty_rows)


def structure_of(graph, features) -> Graph | None:
    """The Graph of a DGLGraph on which features of its sources, and of its destinations where there are two, are to be
    worked on by larger ops of ours. None for several edge types, wrong features (DGL words the errors), autocast
    (its casts are those of the ops)."""
    if autocasting() or any(f is None for f in features) or unsupported(*features) is not None:
        return None
    index = index_of(graph)
    structure_ = known_structure(index)
    if structure_ is None:
        if index.number_of_etypes() != 1:
            return None
        structure_ = structure(index)
    counts = (structure_.num_cols, structure_.num_rows)
    fits = all(f.shape[0] == count for f, count in zip(features, counts, strict=False))
    return structure_ if fits and features[0].device == structure_.device else None


def features_of(feat) -> tuple:
    """Of the sources and, where they are given apart, of the destinations. A tuple of another length: none."""
    if not isinstance(feat, tuple):
        return (feat,)
    return feat if len(feat) == 2 else ()


def conv_forward(original):
    """GraphConv.forward that calls `ops.graph_conv` where the layer is a plain one."""

    def forward(self, graph, feat, weight=None, edge_weight=None):
        features = features_of(feat)
        if not _convolves(self, graph, features, weight, edge_weight):
            return original(self, graph, feat, weight, edge_weight)
        with report.accelerated("dgl.GraphConv"):
            return _convolved(self, graph, features[0], self.weight if weight is None else weight, edge_weight)

    return forward


def _convolves(layer, graph, features, weight, edge_weight) -> bool:
    """True for a GraphConv that `ops.graph_conv` can stand for: one dtype, a matrix, a bias as wide as the result, one
    weight per edge. What else DGL takes (it broadcasts, and promotes) its own forward takes."""
    if not features or not plain(layer, graph, features) or features[0].dim() < 2:
        return False
    if weight is not None and layer.weight is not None:
        return False
    x, matrix = features[0], layer.weight if weight is None else weight
    given = [t for t in (matrix, layer.bias, edge_weight) if t is not None]
    if any(not isinstance(t, torch.Tensor) or t.dtype != x.dtype or t.device != x.device for t in given):
        return False
    if matrix is not None and (matrix.dim() != 2 or matrix.shape[0] != x.shape[-1]):
        return False
    if layer.bias is not None and layer.bias.shape != (x.shape[-1] if matrix is None else matrix.shape[1],):
        return False
    return edge_weight is None or tuple(edge_weight.shape) in ((graph.num_edges(),), (graph.num_edges(), 1))


def _convolved(layer, graph, x, weight, edge_weight):
    """What GraphConv.forward computes; its norms commute with its linear map."""
    powers, activation, made = _POWERS[conv_norm(layer)], conv_activation(layer), out_features(layer)
    left, right = norm(graph, "out_degrees", powers[0], x.dtype), norm(graph, "in_degrees", powers[1], x.dtype)
    relu = activation in (nn.functional.relu, torch.relu)
    if type(activation) is nn.ReLU:
        relu = not is_watched(activation)
    width = x.k if isinstance(x, ops.CBSR) and x.is_compressed else in_features(layer)  # what an edge reads
    first, after = width > made, weight is not None and width <= made
    if first and weight is not None:  # fewer features to sum up
        x = x @ weight
    fused = {} if after else {"bias": layer.bias, "relu": relu}
    edge_weight = None if edge_weight is None else edge_weight.reshape(-1)
    out = ops.graph_conv(structure(index_of(graph)), x, edge_weight, source_scale=left, row_scale=right, **fused)
    if after:
        out = out @ weight if layer.bias is None else nn.functional.linear(out, weight.t(), layer.bias)
    if activation is not None and (after or not relu):
        out = activation(out)
    return out


# norm -> powers of the degrees of the sources and of the destinations; None: they do not count
_POWERS = {"none": (None, None), "both": (-0.5, -0.5), "left": (-1.0, None), "right": (None, -1.0)}


def sage_forward(original):
    """SAGEConv.forward without frames, where it sums, averages or takes maxima."""

    def forward(self, graph, feat, edge_weight=None):
        structure_, kind = None, sage_kind(self)
        if kind in ("mean", "gcn", "pool") and not (kind == "gcn" and _in_one_frame(graph, feat)):
            structure_ = _sums(graph, feat, edge_weight, alike=kind == "gcn")
        if structure_ is None:
            return original(self, graph, feat, edge_weight)
        return _sage(self, graph, structure_, feat)  # its sums are counted

    return forward


def _sums(graph, feat, edge_weight, alike: bool) -> Graph | None:
    """The Graph for a SAGEConv or GINConv of matrices (`alike`: of the same width) without edge weights; None if it is
    not a plain call."""
    features = features_of(feat)
    if edge_weight is not None or not features or not is_plain(graph):
        return None
    structure_ = structure_of(graph, features)
    if structure_ is None or not structure_.nnz or any(f.dim() != 2 for f in features):
        return None
    if alike and features[0].shape[1] != features[-1].shape[1]:
        return None
    one_side = len(features) == 2 or graph.is_block or structure_.num_rows == structure_.num_cols
    return structure_ if one_side else None


def _in_one_frame(graph, feat) -> bool:
    """True for features of both ends of the edges of a graph where these are the same nodes: what DGL stores of the
    second takes the place of the first."""
    return isinstance(feat, tuple) and not graph.is_block and len(graph.ntypes) == 1


_FORWARDS: dict[type, Callable] = {cls: cls.forward for cls in (nn.Sequential, nn.Linear, nn.BatchNorm1d, nn.ReLU)}


def _is_unchanged(module) -> bool:
    """True for a module of these classes that nobody watches, compiles or has changed."""
    return is_as_made(module, _FORWARDS) and not is_watched(module)


def _map_of(layer) -> tuple | None:
    """Weight and bias of a linear map that nobody watches, compiles or has changed."""
    if type(layer) is not nn.Linear or not _is_unchanged(layer) or type(layer.weight) is not nn.Parameter:
        return None
    return layer.weight, layer.bias


def _mean_mapped(layer, structure_: Graph, x: torch.Tensor) -> torch.Tensor | None:
    """fc_self(x of the destinations) + fc_neigh(means of x), as one function of autograd where it can be one: the
    destinations are the first of the sources. None where not."""
    rows, (width, made) = structure_.num_rows, sage_widths(layer)
    # To map before the sum is shorter where there are more destinations than half the sources, and wider features.
    if width > made and 2 * rows > structure_.num_cols:
        return None
    own, behind, start = _map_of(layer.fc_self), _map_of(layer.fc_neigh), time.perf_counter()
    if own is None or behind is None or behind[1] is not None:
        return None
    out = linear_sums.sum_mapped(structure_, x, "mean", behind[0], own[1], own[0])
    if out is not None:
        report.record("dgl.gspmm copy_lhs.mean", start)
    return out


def _sage(layer, graph, structure_: Graph, feat):
    if isinstance(feat, tuple):
        source, target = layer.feat_drop(feat[0]), layer.feat_drop(feat[1])
    else:
        source = target = layer.feat_drop(feat)
        if graph.is_block:
            target = source[: structure_.num_rows]
    kind, (width, made) = sage_kind(layer), sage_widths(layer)
    first = width > made
    if kind == "pool":
        pooled = copied(graph, structure_, nn.functional.relu(layer.fc_pool(source)), "max")
        out = layer.fc_self(target) + layer.fc_neigh(pooled)
    elif (
        kind == "mean" and not isinstance(feat, tuple) and (out := _mean_mapped(layer, structure_, source)) is not None
    ):
        pass
    elif kind == "mean":
        out = copied(graph, structure_, layer.fc_neigh(source) if first else source, "mean")
        out = out if first else layer.fc_neigh(out)
        out = layer.fc_self(target) + out
    else:
        x = layer.fc_neigh(source) if first else source
        if isinstance(feat, tuple):
            own = layer.fc_neigh(target) if first else target
        else:
            own = x[: structure_.num_rows] if graph.is_block else x
        out = (copied(graph, structure_, x, "sum") + own) / degrees_and_one(graph, target.dtype)
        out = out if first else layer.fc_neigh(out)
        out = out if layer.bias is None else out + layer.bias
    if layer.activation is not None:
        out = layer.activation(out)
    return out if layer.norm is None else layer.norm(out)


def _mapped(function, x: torch.Tensor) -> torch.Tensor:
    """function(x), of two linear maps with a ReLU, and perhaps a batch norm, between them one op."""
    modules = [*function] if type(function) is nn.Sequential and _is_unchanged(function) else []
    if None in modules:
        return function(x)
    if len(modules) > 2 and type(modules[1]) is nn.ReLU:
        modules.insert(1, None)
    if len(modules) < 4 or type(modules[2]) is not nn.ReLU or not _is_unchanged(modules[2]):
        return function(x)
    first, norm, _, last, *others = modules
    maps, last_maps, out = _map_of(first), _map_of(last), None
    alike = norm is None or (type(norm) is nn.BatchNorm1d and _is_unchanged(norm))
    if alike and maps is not None and last_maps is not None:
        out = normed_by(x, maps, norm, last_maps)
    if out is None:
        return function(x)
    for module in others:
        out = module(out)
    return out


def gin_forward(original):
    """GINConv.forward without frames."""

    def forward(self, graph, feat, edge_weight=None):
        structure_ = _sums(graph, feat, edge_weight, alike=True)
        one = structure_ is not None and isinstance(self.eps, torch.Tensor) and self.eps.numel() == 1
        if not one or self.eps.dtype != (feat[0] if isinstance(feat, tuple) else feat).dtype:
            return original(self, graph, feat, edge_weight)
        source, target = feat if isinstance(feat, tuple) else (feat, feat)
        if graph.is_block and not isinstance(feat, tuple):
            target = feat[: structure_.num_rows]
        out = torch.addcmul(copied(graph, structure_, source, gin_kind(self)), target, 1 + self.eps)
        out = out if self.apply_func is None else _mapped(self.apply_func, out)
        return out if self.activation is None else self.activation(out)

    return forward
