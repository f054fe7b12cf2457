"""Layers that sum up the sources of each destination with fixed weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gnnaccel import ops
from gnnaccel.graph import scales
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _check
from gnnaccel.ops.cbsr import CBSR
from gnnaccel.tiles.translate import KERNELS


class GCNConv(nn.Module):
    """out[v] = sum over edges (u, v) of weight[e] * W x[u] / sqrt(outdeg(u) * indeg(v)), plus a bias.

    Parameters
    ----------
    in_feats, out_feats : int
    bias : bool
    relu : bool
        What is below 0 becomes 0, in the pass of the sum where that comes last.
    kernel : {"auto", "csr", "tiled"}
        "tiled": the sum goes by tiles (see `ops.spmm`), and the rest is done around it. "csr" is "auto".
    method : str, optional
        The old name of kernel.

    Raises
    ------
    ValueError
        For another kernel.

    Notes
    -----
    Degrees count edges, whatever these weigh. Norms, sum, bias and ReLU are one op (`ops.graph_conv`), but not by
    tiles; the linear map comes before it where it leaves fewer features to sum up, else after it.
    Source: Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks, ICLR 2017.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> from gnnaccel.nn import GCNConv
    >>> graph = gnnaccel.Graph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]), num_rows=3, num_cols=3)
    >>> GCNConv(5, 4)(graph, torch.rand(3, 5)).shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        *,
        bias: bool = True,
        relu: bool = False,
        kernel: str = "auto",
        method: str | None = None,
    ):
        super().__init__()
        if method is not None:
            _check.renamed("GCNConv: method=", "kernel=")
            kernel = method
        _check.one_of("GCNConv", "kernel", kernel, KERNELS)
        self.kernel = kernel
        self.linear = nn.Linear(in_feats, out_feats, bias=False)
        self.bias = nn.Parameter(torch.empty(out_feats)) if bias else None
        self.relu = relu
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, by Glorot and Bengio; zero the bias."""
        nn.init.xavier_uniform_(self.linear.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, graph: Graph, x: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """x [num_cols, in_feats], edge_weight [nnz] in edge-id order; [num_rows, out_feats]."""
        narrows = self.narrows(x)
        return self.finished(graph, self.linear(x) if narrows else x, edge_weight, narrows)

    def narrows(self, x: Tensor) -> bool:
        """Whether the linear map comes before the sum: what is read at an edge, of a CBSR tensor the entries that it
        keeps, is wider."""
        return (x.k if isinstance(x, CBSR) and x.is_compressed else self.linear.in_features) > self.linear.out_features

    def finished(self, graph: Graph, x: Tensor, edge_weight: Tensor | None, mapped: bool) -> Tensor:
        """The layer's result of rows that the linear map has been applied to, or not."""
        if mapped and self.kernel != "tiled":  # all in one pass
            bias = None if self.bias is None else self.bias.to(x.dtype)  # under autocast x is narrower
            return self._sum(graph, x, edge_weight, bias=bias, relu=self.relu)
        out = self._sum(graph, x, edge_weight)
        out = out if mapped else self.linear(out)
        out = out if self.bias is None else out + self.bias.to(out.dtype)
        return out.relu() if self.relu else out

    def _sum(self, graph: Graph, x: Tensor, edge_weight: Tensor | None, **epilogue) -> Tensor:
        """The sum between its norms; `epilogue`: what else `ops.graph_conv` is to do in the same pass."""
        left, right = scales.gcn_scale(graph, x.dtype), scales.source_scale(graph, x.dtype)
        if self.kernel != "tiled":
            return ops.graph_conv(graph, x, edge_weight, source_scale=right, row_scale=left, **epilogue)
        scaled = (x * right.unsqueeze(1)).to(x.dtype)
        # The mean times the root of the degree: in fp16 a sum may be too large.
        mean = ops.spmm(graph, scaled, edge_weight, reduce="mean", kernel="tiled")
        return (mean * left.reciprocal().unsqueeze(1)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"bias={self.bias is not None}, relu={self.relu}, kernel={self.kernel!r}"


class SAGEConv(nn.Module):
    """out[v] = W mean over edges (u, v) of weight[e] * x[u] + R x[v], plus a bias.

    Parameters
    ----------
    in_feats, out_feats : int
    bias : bool
    root : bool
        Whether there is an R.

    Notes
    -----
    The linear map W comes before the mean where it leaves fewer features to sum up, else after it.
    Source: Hamilton, Ying and Leskovec, Inductive Representation Learning on Large Graphs, NeurIPS 2017.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> from gnnaccel.nn import SAGEConv
    >>> graph = gnnaccel.Graph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]), num_rows=3, num_cols=3)
    >>> SAGEConv(5, 4)(graph, torch.rand(3, 5)).shape
    torch.Size([3, 4])
    """

    def __init__(self, in_feats: int, out_feats: int, *, bias: bool = True, root: bool = True):
        super().__init__()
        self.linear = nn.Linear(in_feats, out_feats, bias=bias)
        self.root = nn.Linear(in_feats, out_feats, bias=False) if root else None

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        self.linear.reset_parameters()
        if self.root is not None:
            self.root.reset_parameters()

    def forward(self, graph: Graph, x: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """x [num_cols, in_feats], of which the first num_rows are the destinations'; [num_rows, out_feats]."""
        narrows = self.narrows(x)
        out = self.mean(graph, nn.functional.linear(x, self.linear.weight) if narrows else x, edge_weight, narrows)
        if self.root is None:
            return out
        return out + self.root(x if graph.num_rows == graph.num_cols else x[: graph.num_rows])

    def narrows(self, x: Tensor) -> bool:
        """Whether W comes before the mean."""
        return (x.k if isinstance(x, CBSR) and x.is_compressed else self.linear.in_features) > self.linear.out_features

    def mean(self, graph: Graph, x: Tensor, edge_weight: Tensor | None, mapped: bool) -> Tensor:
        """W of the mean, plus the bias, of rows that W has been applied to, or not."""
        out = ops.spmm(graph, x, edge_weight, reduce="mean")
        if not mapped:
            return self.linear(out)
        return out if self.linear.bias is None else out + self.linear.bias.to(out.dtype)


class GINConv(nn.Module):
    """out[v] = net((1 + eps) * x[v] + sum over edges (u, v) of weight[e] * x[u]).

    Parameters
    ----------
    net : callable
        Usually an MLP.
    eps : float
    learn_eps : bool

    Notes
    -----
    Source: Xu, Hu, Leskovec and Jegelka, How Powerful are Graph Neural Networks, ICLR 2019.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> from gnnaccel.nn import GINConv
    >>> graph = gnnaccel.Graph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]), num_rows=3, num_cols=3)
    >>> GINConv(torch.nn.Linear(5, 4))(graph, torch.rand(3, 5)).shape
    torch.Size([3, 4])
    """

    def __init__(self, net, *, eps: float = 0.0, learn_eps: bool = False):
        super().__init__()
        self.net = net
        self.eps = nn.Parameter(torch.tensor(float(eps))) if learn_eps else float(eps)

    def forward(self, graph: Graph, x: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """x [num_cols, F], of which the first num_rows are the destinations'."""
        own = x if graph.num_rows == graph.num_cols else x[: graph.num_rows]
        return self.net((1 + self.eps) * own + ops.spmm(graph, x, edge_weight))

    def extra_repr(self) -> str:
        return "" if isinstance(self.eps, nn.Parameter) else f"eps={self.eps}"
