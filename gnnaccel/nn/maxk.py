"""MaxK, the nonlinearity of MaxK-GNN, as a module."""

from __future__ import annotations

from torch import Tensor, nn

from gnnaccel import ops


class MaxK(nn.Module):
    """Keeps the k largest entries of each row, in place of a ReLU in front of a sum over a graph.

    Parameters
    ----------
    k : int
        At least 1. Rows of k features or fewer are kept whole.

    Raises
    ------
    ValueError
        For a k below 1. TypeError: for one that is no int.

    Notes
    -----
    Not the same model as one with ReLU: other entries are kept, negative ones too where fewer than k are positive.
    Source: MaxK-GNN (Peng et al., ASPLOS 2024).

    Examples
    --------
    >>> import torch
    >>> from gnnaccel.nn import MaxK
    >>> MaxK(2)(torch.tensor([[3.0, 1.0, 2.0]])).to_dense()
    tensor([[3., 0., 2.]])
    """

    def __init__(self, k: int):
        super().__init__()
        if isinstance(k, bool) or not isinstance(k, int):
            raise TypeError(f"MaxK: k: expected an int, got {type(k).__name__}")
        if k < 1:
            raise ValueError(f"MaxK: k: expected at least 1, got {k}")
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        """x [N, D]; a CBSR tensor [N, D] (`ops.maxk`)."""
        return ops.maxk(x, min(self.k, x.shape[-1]) if x.dim() else self.k)

    def extra_repr(self) -> str:
        return f"k={self.k}"
