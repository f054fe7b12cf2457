"""What the tests of MaxK share: hostile rows, and which of their entries are to be kept."""

import torch

from gnnaccel.graph.csr import Graph


def hostile(rows: int, num_feats: int, dtype=torch.float32, device="cpu") -> torch.Tensor:
    """Rows of few values, of many ties, with infinities, NaN, both zeros."""
    x = torch.randn(rows, num_feats, dtype=torch.float64, device=device)
    x[1::7] = x[1::7].round()
    x[2::7] = x[2::7].clamp(min=0)
    x[3::7] = torch.where(torch.rand_like(x[3::7]) < 0.3, torch.nan, x[3::7])
    x[4::7] = torch.where(torch.rand_like(x[4::7]) < 0.3, torch.inf, x[4::7] * 1e30)
    x[5::7] = torch.where(torch.rand_like(x[5::7]) < 0.5, -0.0, 0.0)
    x[6::7] = -torch.inf
    return x.to(dtype)


def places_of(x: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of each row by a stable sort, ascending; on the CPU."""
    return x.cpu().double().sort(dim=1, descending=True, stable=True).indices[:, :k].sort(1).values


def graph_of(rows=30, cols=40, nnz=300, index=torch.int64):
    """With empty rows, repeated edges and a hub."""
    row, col = torch.randint(2, rows, (nnz,)), torch.randint(cols, (nnz,))
    row[: nnz // 3] = 3
    return Graph.from_coo(row.to(index), col.to(index), num_rows=rows, num_cols=cols)
