"""PyG's way from edges to rows, with a look at the edges first: of such as are out of range, torch writes elsewhere."""

from __future__ import annotations

import torch
import torch_geometric.sampler.utils
from torch import Tensor
from torch_geometric.utils import sparse as pyg_sparse

from gnnaccel.bound import rebind
from gnnaccel.pyg_backend.touch import Index


def index2ptr(index: Tensor, size: int | None = None) -> Tensor:
    """torch_geometric.utils.sparse.index2ptr. ValueError for numbers that do not ascend, or are not in [0, size)."""
    plain = index.as_tensor() if isinstance(index, Index) else index
    if size is not None:
        check_nodes(plain, size)
        if bool((plain[1:] < plain[:-1]).any()):  # also where PyG has sorted by both ends, and the others are wrong
            raise ValueError(
                f"edge_index: expected nodes in [0, {size}), and edges in the order that is_sorted=True promises"
            )
    return pyg_sparse.index2ptr(index, size)


def check_nodes(index: Tensor, size: int) -> None:
    """ValueError unless all are in [0, size)."""
    if index.numel():
        least, most = torch.aminmax(index)
        if not 0 <= int(least) <= int(most) < size:
            raise ValueError(f"edge_index: expected nodes in [0, {size}), got {int(least)} to {int(most)}")


to_csc = rebind(torch_geometric.sampler.utils.to_csc, index2ptr=index2ptr)
to_hetero_csc = rebind(torch_geometric.sampler.utils.to_hetero_csc, to_csc=to_csc)
