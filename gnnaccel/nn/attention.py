"""Layers that weigh the sources of each destination by attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _check
from gnnaccel.tiles.translate import KERNELS


class GATConv(nn.Module):
    """out[v, h] = sum over edges (u, v) of a[e, h] * W_h x[u], the heads side by side or their mean.

    a = softmax over the edges into v of leaky_relu(source_h . W_h x[u] + target_h . W_h x[v] + edge_h . V_h f[e]).

    Parameters
    ----------
    in_feats : int or (int, int)
        Features of the nodes; of sources and destinations, which then have weights of their own.
    out_feats : int
        Features of a head.
    heads : int
    concat : bool
        The heads side by side [num_rows, heads * out_feats], or their mean [num_rows, out_feats].
    edge_feats : int
        Features of an edge that take part in its score; 0: none.
    negative_slope, dropout : float
        Of the leaky_relu, and of the attention in training, in [0, 1).
    bias : bool

    Notes
    -----
    Without `return_attention` one op, and with edge features their scores [nnz, heads] before it: what it keeps, the
    Notes of `ops.attention` and `ops.edge_attention` say; with dropout as much.
    Source: Velickovic et al., Graph Attention Networks, ICLR 2018.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> from gnnaccel.nn import GATConv
    >>> graph = gnnaccel.Graph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]), num_rows=3, num_cols=3)
    >>> GATConv(5, 4, heads=2)(graph, torch.rand(3, 5)).shape
    torch.Size([3, 8])
    """

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        out_feats: int,
        heads: int = 1,
        *,
        concat: bool = True,
        edge_feats: int = 0,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        bias: bool = True,
    ):
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"GATConv: dropout: expected a part in [0, 1), got {dropout}")
        self.heads, self.out_feats, self.concat = heads, out_feats, concat
        self.negative_slope, self.dropout = negative_slope, dropout
        width = heads * out_feats
        source, target = in_feats if isinstance(in_feats, tuple) else (in_feats, None)
        self.linear = nn.Linear(source, width, bias=False)
        self.linear_target = None if target is None else nn.Linear(target, width, bias=False)
        self.attention = nn.Parameter(torch.empty(2, heads, out_feats))  # with sources, with destinations
        self.linear_edge = nn.Linear(edge_feats, heads, bias=False) if edge_feats else None  # both maps in one
        self.bias = nn.Parameter(torch.empty(width if concat else out_feats)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, by Glorot and Bengio; zero the bias."""
        for layer in (self.linear, self.linear_target, self.linear_edge):
            if layer is not None:
                nn.init.xavier_uniform_(layer.weight)
        bound = math.sqrt(6 / (self.heads + self.out_feats))
        nn.init.uniform_(self.attention, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        graph: Graph,
        x: Tensor | tuple[Tensor, Tensor],
        edge_feats: Tensor | None = None,
        *,
        return_attention: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The layer's result; with `return_attention` also the weights [nnz, heads], in edge-id order.

        Parameters
        ----------
        graph : Graph
        x : Tensor [num_cols, in_feats], or a pair with [num_rows, in_feats] for the destinations
            One tensor: the destinations are its first num_rows.
        edge_feats : Tensor [nnz, edge_feats], edge-id order

        Raises
        ------
        ValueError
            For edge features that the layer was not made for, or that are missing.
        """
        if (edge_feats is None) != (self.linear_edge is None):
            raise ValueError(
                "GATConv: edge_feats: the layer was made "
                + ("with" if edge_feats is None else "without")
                + " edge_feats, the call has "
                + ("none" if edge_feats is None else "some")
            )
        if edge_feats is not None and len(edge_feats) != graph.nnz:
            raise ValueError(f"GATConv: edge_feats: expected {graph.nnz} rows, one per edge, got {len(edge_feats)}")
        source, to_source, to_target = self._scores(graph, x)
        dropout, slope = self.dropout if self.training else 0.0, self.negative_slope
        if self.linear_edge is None and not return_attention:
            out = ops.attention(graph, source, to_source, to_target, negative_slope=slope, dropout=dropout)
            return self._finished(out)
        scores = ops.sddmm(graph, to_source, to_target, "add", "u", "v")
        if self.linear_edge is not None:
            scores = scores + self.linear_edge(edge_feats)
        scores = F.leaky_relu(scores, slope)
        if not return_attention:
            return self._finished(ops.edge_attention(graph, scores, source, dropout=dropout))
        weights = F.dropout(ops.edge_softmax(graph, scores), dropout)
        return self._finished(ops.spmm(graph, source, weights)), weights

    def _finished(self, out: Tensor) -> Tensor:
        out = out.flatten(1) if self.concat else out.mean(1)
        return out.clone() if self.bias is None else out + self.bias  # not what the op keeps for the backward

    def _scores(self, graph: Graph, x) -> tuple[Tensor, Tensor, Tensor]:
        """Heads of the sources, and their share and the destinations' in the scores."""
        shape = (-1, self.heads, self.out_feats)
        if isinstance(x, tuple):
            target_map = self.linear if self.linear_target is None else self.linear_target
            source, target = self.linear(x[0]).view(shape), target_map(x[1]).view(shape)
            attention = self.attention.to(source.dtype)  # under autocast a narrower one
            return source, ops.head_dots(source, attention[:1])[0], ops.head_dots(target, attention[1:])[0]
        if self.linear_target is not None:
            raise ValueError("GATConv: x: expected a pair of tensors, as in_feats is a pair, got one")
        source = self.linear(x).view(shape)
        to_source, to_target = ops.head_dots(source, self.attention.to(source.dtype)).unbind()
        return source, to_source, to_target[: graph.num_rows]

    def extra_repr(self) -> str:
        return f"heads={self.heads}, out_feats={self.out_feats}, concat={self.concat}"


class AGNNConv(nn.Module):
    """out[v] = sum over edges (u, v) of a[e] * x[u], a = softmax over the edges into v of beta * cos(x[u], x[v]).

    Parameters
    ----------
    beta : float
        Where it starts.
    learn_beta : bool
        A parameter, or a buffer.
    kernel : {"auto", "csr", "tiled"}
        "tiled": inner products and sum go by tiles (see `ops.spmm`), and a weight per edge is kept.
    method : str, optional
        The old name of kernel.

    Raises
    ------
    ValueError
        For another kernel.

    Notes
    -----
    One op on normalised features, but not by tiles: what it keeps, the Notes of `ops.dot_attention` say.
    Source: Thekumparampil et al., Attention-based Graph Neural Network for Semi-supervised Learning, 2018.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> from gnnaccel.nn import AGNNConv
    >>> graph = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> AGNNConv()(graph, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    tensor([[1., 0.],
            [0., 0.]], grad_fn=<CloneBackward0>)
    """

    def __init__(self, beta: float = 1.0, learn_beta: bool = True, *, kernel: str = "auto", method: str | None = None):
        super().__init__()
        if method is not None:
            _check.renamed("AGNNConv: method=", "kernel=")
            kernel = method
        _check.one_of("AGNNConv", "kernel", kernel, KERNELS)
        self.kernel = kernel
        value = torch.tensor([float(beta)])
        if learn_beta:
            self.beta = nn.Parameter(value)
        else:
            self.register_buffer("beta", value)

    def forward(self, graph: Graph, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """x [num_cols, F], or a pair with [num_rows, F] for the destinations; one tensor: they are its first rows."""
        source = x[0] if isinstance(x, tuple) else x
        key = F.normalize(source, dim=-1)
        query = F.normalize(x[1], dim=-1) if isinstance(x, tuple) else key[: graph.num_rows]
        if self.kernel == "tiled":
            scores = ops.sddmm(graph, key, self.beta * query, kernel="tiled")
            return ops.spmm(graph, source, ops.edge_softmax(graph, scores), kernel="tiled")
        heads = (t.unsqueeze(1) for t in (self.beta * query, key, source))
        return ops.dot_attention(graph, *heads, scale=1.0).squeeze(1).clone()  # not what the op keeps for the backward
