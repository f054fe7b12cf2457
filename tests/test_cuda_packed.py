"""CUDA kernels on a graph in one tensor, with nonzeros of no row behind the last one: what the graph itself gives."""

import pytest
import torch
from cuda_cases import DEVICE

pytest.importorskip("torch_geometric")
from gnnaccel import _operators
from gnnaccel.ops._described import Described
from gnnaccel.ops._packed import structure_of
from gnnaccel.pyg_backend.graph import of_described

assert of_described is Described.graph_of
pytestmark = pytest.mark.usefixtures("poisoned")
N, E, LOOPS = 150, 1500, 700  # more of the latter than a worker's piece of nonzeros has
_operators.define_twins()
OPS = torch.ops.gnnaccel


def edges(last):
    """Of which many are loops; `last`: the last node has no edge but its own, some, or more than a chunk."""
    g = torch.Generator().manual_seed(3)
    index = torch.randint(0, N - 1 if last == "lonely" else N, (2, E), generator=g)
    index[1, :LOOPS] = index[0, :LOOPS]
    if last == "hub":
        index[1, LOOPS : LOOPS + 500] = N - 1
    return index[:, torch.randperm(E, generator=g)].to(DEVICE)


def rand(*shape, grad=True):
    g = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=g).to(DEVICE).requires_grad_(grad)


def cases(width):
    x, heads, scale = rand(N, width), rand(N, 2, width), rand(N, grad=False).abs()
    scores, weight = rand(N, 2), rand(E + N, 1)
    yield "degrees", ()
    for reduce in ("sum", "mean"):
        yield "spmm", (x, None, "copy_lhs", reduce, 0.0)
        yield "spmm", (x, weight, "mul", reduce, 0.0)
    yield "spmm", (heads, rand(E + N, 2).unsqueeze(-1), "mul", "sum", 0.0)
    yield "spmm", (None, weight, "copy_rhs", "sum", 0.0)
    yield "spmm_max_min", (x, None, "copy_lhs", "max", 0.0, False)
    yield "spmm_max_min", (x, weight, "mul", "min", 0.0, False)
    yield "graph_conv", (x, None, scale, scale, rand(width), False)
    yield "sddmm", (x, x, "dot", "u", "v")
    yield "sddmm", (x, x, "add", "u", "v")
    yield "edge_softmax", (rand(E + N, 2),)
    yield "attention", (heads, scores, scores, None, None, 0.0, 0.2, True)
    yield "dot_attention", (heads, heads, heads, None, None, None, 0.0, 0.5)
    yield "gatv2_scores", (heads, heads, rand(2, width), 0.2)


@pytest.mark.parametrize("last", ["lonely", "some", "hub"])
@pytest.mark.parametrize("width", [1, 7, 8, 33, 64])
def test_ops(width, last):
    index = edges(last)
    described = Described(index, N, N, "one")
    graph, packed = described.graph(), structure_of(described, True)
    assert graph.nnz < packed.indices.shape[0] == packed.nnz == described.nnz == E + N
    used = torch.zeros(E + N, dtype=torch.bool, device=index.device)
    used[graph.edge_ids.long()] = True

    def run(name, structure, args):
        args = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
        op = getattr(OPS, name if structure is packed else f"{name}_of_edges")
        out = op(*structure.flat(), *args)
        out = out[0] if isinstance(out, tuple) else out
        asked = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        if not out.requires_grad:
            return [out]
        grad = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
        return [out, *torch.autograd.grad(out, asked, grad)]

    for name, args in cases(width):
        for ours, theirs in zip(run(name, packed, args), run(name, described, args), strict=True):
            if ours.shape[0] == E + N:
                ours, theirs = ours[used], theirs[used]
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
