"""Products of the features of many nodes with small float32 matrices (gnnaccel.ops.products), and two linear maps with
a batch norm and a ReLU between them (gnnaccel.ops.normed_layers), beside torch's.

    python benchmarks/products.py --csv products.csv

Device times in microseconds: x @ weight.T + bias, the gradient to x, those to weight and bias; of the layers forward
and backward. error: the largest of ours to float64, by the largest value; of layers, that of any gradient.
"""

from __future__ import annotations

import argparse
import copy

import torch
from cpu_layers import versions
from timing import provenance, save_table, time_ms
from torch import nn
from torch.nn import functional as F

from gnnaccel.ops import products
from gnnaccel.ops.normed_layers import normed_layers

SHAPES = (
    *((169_343, 64, outer) for outer in (64, 128, 192, 256)),
    *((410_236, *widths) for widths in ((64, 128), (128, 64), (64, 256))),
    *((169_343, *widths) for widths in ((128, 128), (128, 512), (256, 256))),
    *((20_000, *widths) for widths in ((64, 128), (64, 256))),
)
NODES = (169_343, 410_236)  # of arxiv-like and amazon0505-like
COLUMNS = ("what", "rows", "inner", "outer", "torch_us", "gnnaccel_us", "error")


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def of_product(rows: int, inner: int, outer: int) -> list[list]:
    x, weight, bias, grad = (
        torch.randn(*s, device="cuda") for s in ((rows, inner), (outer, inner), (outer,), (rows, outer))
    )
    cases = {
        "x @ weight.T + bias": (
            lambda: F.linear(x, weight, bias),
            lambda: products.linear(x, weight, bias),
            lambda: F.linear(x.double(), weight.double(), bias.double()),
        ),
        "gradient to x": (
            lambda: grad.mm(weight),
            lambda: products.back(grad, weight),
            lambda: grad.double() @ weight.double(),
        ),
        "gradients to weight and bias": (
            lambda: (grad.t().mm(x), grad.sum(0))[0],
            lambda: (products.of_weight(x, grad, True) or (grad.t().mm(x), grad.sum(0)))[0],
            lambda: grad.double().t() @ x.double(),
        ),
    }
    table = []
    for what, (theirs, ours, exact) in cases.items():
        error = error_of(ours(), exact())
        assert error < 1e-5, f"{what}: off by {error}"
        times = [f"{time_ms(run)[0] * 1e3:.1f}" for run in (theirs, ours)]
        table.append([what, rows, inner, outer, *times, f"{error:.1e}"])
    return table


def of_layers(rows: int) -> list[list]:
    x = torch.randn(rows, 64, device="cuda", requires_grad=True)
    layers = nn.Sequential(
        nn.Linear(64, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64, bias=False)
    )
    first, norm, _, last = layers.cuda()
    exactly = copy.deepcopy(layers).double()
    running = (norm.running_mean.clone(), norm.running_var.clone())

    def ours() -> torch.Tensor:
        maps, weights = (first.weight, None), (norm.weight, norm.bias)
        found = normed_layers(x, maps, weights, running, (last.weight, None), norm.eps, norm.momentum)
        assert found is not None
        return found

    sides = (lambda: layers(x), ours)
    wanted = [x, *layers.parameters()]
    outs = [run() for run in sides]
    x64 = x.detach().double().requires_grad_()
    normed = exactly[:2](x64)
    # Of what comes within rounding of the ReLU's zero, either side may pass a gradient that float64 does not: a
    # twentieth of the largest. So rows that have such get none.
    unsure = (normed.detach().abs() < 1e-5).any(1, keepdim=True)
    seed = torch.randn_like(outs[0]).masked_fill_(unsure, 0)
    grads = [torch.autograd.grad(out, wanted, seed, retain_graph=True) for out in outs]
    exact = torch.autograd.grad(exactly[2:](normed), [x64, *exactly.parameters()], seed.double())
    theirs, error = (max(map(error_of, found, exact)) for found in grads)
    assert error < max(3 * theirs, 1e-5), f"gradients are off by {error}, torch's by {theirs}"
    table = []
    for what, runs in (
        ("layers forward", sides),
        (
            "layers backward",
            [lambda out=out: torch.autograd.grad(out, wanted, seed, retain_graph=True) for out in outs],
        ),
    ):
        times = [f"{time_ms(run)[0] * 1e3:.1f}" for run in runs]
        table.append([what, rows, 64, 128, *times, f"{error:.1e}"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", metavar="OUT", help="also write the figures there")
    parser.add_argument("--commit", help="named in the table's head; by default what git says")
    options = parser.parse_args()
    torch.manual_seed(0)
    table = []
    for rows in [*(of_product(*shape) for shape in SHAPES), *map(of_layers, NODES)]:
        for row in rows:
            print(*row, sep="  ", flush=True)
        table += rows
    if options.csv:
        save_table(options.csv, [f"# {versions()}", *provenance(options.commit)], COLUMNS, table)


if __name__ == "__main__":
    main()
