"""What a call costs on a graph of 12 nodes and 40 edges: ops.spmm, torch.sparse.mm and gather with index_add.

`python benchmarks/epochs.py --per-op` runs it. Microseconds of a call, the least of many rounds, the sides in turns,
the GPU synchronised at the end of a round alone. Backward is torch.autograd.grad: for a sum to the features, for a
weighted sum to features and weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from host import EDGES, NODES, WIDTH, micros
from timing import left_out, save_table, short
from torch import Tensor

from gnnaccel import ops
from gnnaccel.graph.csr import Graph

COLUMNS = ("op", "pass", "gnnaccel_us", "torch_sparse_us", "gather_us")
CALLS, ROUNDS = 200, 15


def forwards(device: torch.device, weighted: bool) -> tuple[list[Callable[[], Tensor]], list[list[Tensor]]]:
    """Our op, torch.sparse.mm, gather and index_add; and for each what its gradient goes to."""
    rng = torch.Generator().manual_seed(0)
    key = torch.randperm(NODES * NODES, generator=rng)[:EDGES].sort().values.to(device)
    target, source = key // NODES, key % NODES
    weight = torch.rand(EDGES, generator=rng).to(device) if weighted else torch.ones(EDGES, device=device)
    x = torch.randn(NODES, WIDTH, generator=rng).to(device).requires_grad_()
    graph = Graph.from_coo(target, source, num_rows=NODES, num_cols=NODES)
    matrix = torch.sparse_csr_tensor(graph.indptr.long(), source, weight, (NODES, NODES))
    if weighted:
        weight, matrix = weight.requires_grad_(), matrix.requires_grad_()

    def gathered() -> Tensor:
        messages = x[source] * weight.view(-1, 1) if weighted else x[source]
        return x.new_zeros(NODES, WIDTH).index_add_(0, target, messages)

    ours = (lambda: ops.spmm(graph, x, weight)) if weighted else (lambda: ops.spmm(graph, x))
    leaves = [[x, weight], [matrix, x], [x, weight]] if weighted else [[x]] * 3
    return [ours, lambda: torch.sparse.mm(matrix, x), gathered], leaves


def both(forward: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> Callable:
    return lambda: torch.autograd.grad(forward(), leaves, grad)


def measure(device: torch.device, weighted: bool) -> list[list]:
    """Two rows: forward; forward and backward."""
    functions, leaves = forwards(device, weighted)
    expected = functions[-1]()
    grad, rows = torch.randn_like(expected), []
    gradients = [both(*pair, grad) for pair in zip(functions, leaves, strict=True)]
    torch.testing.assert_close(functions[0](), expected)
    torch.testing.assert_close(gradients[0](), gradients[-1](), rtol=1e-4, atol=1e-5)
    for which, calls in (("forward", functions), ("forward and backward", gradients)):
        best: list[float | None] = [float("inf")] * len(calls)
        for _ in range(3):
            for place, call in enumerate(calls):
                try:
                    least = micros(call, CALLS, ROUNDS // 3, device)
                    best[place] = min(best[place], least) if best[place] is not None else None
                except RuntimeError as error:  # no such op on this device
                    left_out(error)
                    best[place] = None
        rows.append(["weighted sum" if weighted else "sum", which, *best])
    return rows


def main(device: torch.device, head: list[str], csv: str | None) -> None:
    """Print the table, write it to `csv`."""
    warnings.filterwarnings("ignore", message="Sparse")
    if device.type == "cpu":
        torch.set_num_threads(1)
    rows = []
    for weighted in (False, True):
        for row in measure(device, weighted):
            cells = [short(cell) for cell in row]
            rows.append(cells)
            print(*(f"{name}={cell}" for name, cell in zip(COLUMNS, cells, strict=True)), flush=True)
    if csv:
        save_table(csv, head, COLUMNS, rows)
