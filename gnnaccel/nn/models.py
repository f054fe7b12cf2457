"""Whole models for node classification, with ReLU or MaxK in front of each sum over the graph."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gnnaccel.graph.csr import Graph
from gnnaccel.nn.convolution import GCNConv, GINConv, SAGEConv
from gnnaccel.nn.maxk import MaxK


class _Stack(nn.Module):
    """logits = out(layer(... layer(in(x)))), with layer(h) = conv(graph, dropout(act(norm(h)))).

    Parameters
    ----------
    in_feats, hidden, num_classes : int
    num_layers : int
        Convolutions, each from `hidden` to `hidden` features.
    maxk : int, optional
        act is `MaxK` with that k; default: ReLU.
    dropout : float
    norm : bool
        Whether there is a LayerNorm in front of each act, and of the last map.

    Notes
    -----
    As MaxK-GNN has them (Peng et al., ASPLOS 2024): a linear map first and last, so that all sums are over `hidden`
    features behind an act. The layers take the graph as it is: put in self-loops where a model wants them.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> graph = gnnaccel.Graph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]), num_rows=3, num_cols=3)
    >>> gnnaccel.nn.GraphSAGE(5, 16, 4, num_layers=2, maxk=4)(graph, torch.rand(3, 5)).shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        in_feats: int,
        hidden: int,
        num_classes: int,
        *,
        num_layers: int = 2,
        maxk: int | None = None,
        dropout: float = 0.0,
        norm: bool = False,
    ):
        super().__init__()
        self.first = nn.Linear(in_feats, hidden)
        self.acts = nn.ModuleList(nn.ReLU() if maxk is None else MaxK(maxk) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) if norm else nn.Identity() for _ in range(num_layers + 1))
        self.convs = nn.ModuleList(self.conv(hidden) for _ in range(num_layers))
        self.last = nn.Linear(hidden, num_classes)
        self.dropout = dropout

    @staticmethod
    def conv(hidden: int) -> nn.Module:
        """One convolution."""
        raise NotImplementedError

    def forward(self, graph: Graph, x: Tensor) -> Tensor:
        """x [num_cols, in_feats] of a graph with as many rows; [num_rows, num_classes]."""
        h = self.first(x)
        for norm, act, conv in zip(self.norms, self.acts, self.convs, strict=False):
            h = conv(graph, F.dropout(act(norm(h)), self.dropout, self.training))
        return self.last(self.norms[-1](h))


class GCN(_Stack):
    __doc__ = (_Stack.__doc__ or "").replace("logits =", "`GCNConv` layers: logits =").replace("GraphSAGE", "GCN")

    @staticmethod
    def conv(hidden: int) -> nn.Module:
        return GCNConv(hidden, hidden)


class GraphSAGE(_Stack):
    __doc__ = (_Stack.__doc__ or "").replace("logits =", "`SAGEConv` layers: logits =")

    @staticmethod
    def conv(hidden: int) -> nn.Module:
        return SAGEConv(hidden, hidden)


class GIN(_Stack):
    __doc__ = (_Stack.__doc__ or "").replace("logits =", "`GINConv` layers: logits =").replace("GraphSAGE", "GIN")

    @staticmethod
    def conv(hidden: int) -> nn.Module:
        return GINConv(nn.Linear(hidden, hidden), learn_eps=True)
