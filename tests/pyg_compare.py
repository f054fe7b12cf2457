"""One program run with plain PyG and twice with the plug-in: what it returns, gradients and errors must be equal."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric import nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import SparseTensor

from gnnaccel import pyg_backend, report

N, E, D = 24, 110, 6  # nodes, edges, features
# Random sums in float64; bf16 keeps 8 bits and may be rounded at other places.
TOLERANCES = {torch.float64: (1e-7, 1e-8), torch.float32: (1e-4, 1e-5), torch.bfloat16: (5e-2, 5e-2)}

# Layers of each way to run: copied, weighted, with attention, with messages of their own.
LAYERS = {
    "GCN": lambda i=D, **k: nn.GCNConv(i, 5, **k),
    "SAGE": lambda i=D, **k: nn.SAGEConv(i, 5, **k),
    "SAGE max": lambda i=D, **k: nn.SAGEConv(i, 5, aggr="max", **k),
    "GraphConv": lambda i=D, **k: nn.GraphConv(i, 5, **k),
    "GIN": lambda i=D, **k: nn.GINConv(nn.MLP([i, 8, 5]), **k),
    "GAT": lambda i=D, **k: nn.GATConv(i, 5, heads=2, **k),
    "GATv2": lambda i=D, **k: nn.GATv2Conv(i, 5, heads=2, **k),
    "Transformer": lambda i=D, **k: nn.TransformerConv(i, 5, heads=2, **k),
    "ResGated": lambda i=D, **k: nn.ResGatedGraphConv(i, 5, **k),
    "EdgeConv": lambda i=D, **k: nn.EdgeConv(nn.MLP([2 * i, 5]), **k),
}


def edges(num_src: int = N, num_dst: int = N, count: int = E, seed: int = 0) -> Tensor:
    """Random edges with self-loops, duplicates and (where square) a node without in-edges."""
    g = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randint(0, n, (count,), generator=g) for n in (num_src, num_dst)])
    if num_src == num_dst and count >= 12:
        index[:, :4] = torch.arange(4)
        index[:, 4:8] = index[:, 8:12]
        index[1][index[1] == num_dst - 1] = 0
    return index


def rand(*shape: int, seed: int = 1, grad: bool = False) -> Tensor:
    """The same normal numbers for the same shape and seed, in the default dtype."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(torch.get_default_dtype()).requires_grad_(grad)


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [leaf for item in items for leaf in tensors(item)]


def backward(out: Any, seed: int = 9) -> None:
    """Backward of a loss that weighs every element of the outputs differently."""
    parts = [o for o in tensors(out) if o.requires_grad and o.layout is torch.strided]
    sum((o.double() * rand(*o.shape, seed=seed).to(o.device, torch.float64)).sum() for o in parts).backward()


def train(model: torch.nn.Module, *args, **kwargs) -> dict[str, Any]:
    """One forward and backward: outputs, and the gradients of all parameters and inputs."""
    out = model(*args, **kwargs)
    backward(out)
    return {"out": out, **grads(model, args, kwargs)}


def grads(model: torch.nn.Module, *inputs) -> dict[str, Any]:
    """Copies of the gradients that lie on the parameters of `model` and on `inputs` now."""
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    for k, leaf in enumerate(tensors(inputs)):
        if leaf.requires_grad and leaf.is_leaf:
            found[f"input {k}"] = None if leaf.grad is None else leaf.grad.clone()
    return found


@contextlib.contextmanager
def _setting(dtype: torch.dtype):
    before, numbers = torch.get_default_dtype(), random.getstate()
    torch.set_default_dtype(dtype)
    torch.set_num_threads(1)  # on graphs this small threads only wait for each other; conftest.py sets it back
    torch.manual_seed(12)
    np.random.seed(12)
    random.seed(12)
    # PyG's Sequential names its generated module by a random number and takes a module of that name that exists.
    for name in [name for name in sys.modules if name.startswith("torch_geometric.nn.sequential_")]:
        del sys.modules[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)
        random.setstate(numbers)


def _result(program: Callable, wrap: Callable, dtype: torch.dtype):
    with _setting(dtype):
        try:
            return program(wrap), None
        except Exception as error:
            return None, error


def _plain(model):
    return model


def same(
    program: Callable,
    *,
    dtype: torch.dtype = torch.float64,
    accelerated: bool | None = True,
    kinds: set[str] | None = None,
    raises: bool = False,
) -> None:
    """Run program(wrap) with PyG alone, with its models accelerated by `wrap`, and under enable(); compare.

    Parameters
    ----------
    program : callable
        Builds a model, passes it to its argument, and returns nested tensors and values; run with the default
        dtype `dtype` from the same random numbers.
    accelerated : bool, optional
        True: some call must have been accelerated, so that the comparison is not PyG against itself. False: none.
    kinds : set of str, optional
        The call site kinds that must have been accelerated; none of them, and no other, was left to PyG.
    raises : bool
        True: PyG raises, and the plug-in must raise the same type with the same text.
    """
    expected, failure = _result(program, _plain, dtype)
    if failure is not None and not raises:
        raise failure
    assert raises == (failure is not None), "PyG alone did not raise"
    for how in ("accelerate", "enable"):
        report.reset()
        if how == "enable":
            pyg_backend.enable()
        try:
            got, error = _result(program, pyg_backend.accelerate if how == "accelerate" else _plain, dtype)
        finally:
            pyg_backend.disable()
        if raises:
            assert error is not None, f"{how}: no error, PyG raises {failure!r}"
            assert (type(error), str(error)) == (type(failure), str(failure)), f"{how}: {error!r}, not {failure!r}"
            continue
        if error is not None:
            raise error
        assert_equal(got, expected, how)
        sites = report.snapshot()
        if accelerated is not None:
            assert accelerated == any(site.accelerated for site in sites.values()), (how, sites)
        if kinds is not None:
            assert set(sites) == kinds and not any(site.left for site in sites.values()), (how, sites)


def assert_equal(got: Any, expected: Any, where: str = "result") -> None:
    """Nested results are equal up to the rounding of their dtype."""
    if isinstance(expected, (Data, HeteroData)):
        got, expected = got.to_dict(), expected.to_dict()
    if isinstance(expected, SparseTensor):
        got, expected = got.coo(), expected.coo()
    if isinstance(expected, dict):
        assert list(got) == list(expected), f"{where}: {list(got)}, not {list(expected)}"
        for key in expected:
            assert_equal(got[key], expected[key], f"{where}: {key}")
    elif isinstance(expected, (tuple, list)):
        assert len(got) == len(expected), f"{where}: {len(got)} items, not {len(expected)}"
        for k, pair in enumerate(zip(got, expected, strict=True)):
            assert_equal(*pair, f"{where}[{k}]")
    elif isinstance(expected, Tensor):
        assert isinstance(got, Tensor), f"{where}: {got!r}"
        assert (got.requires_grad, got.is_inference()) == (expected.requires_grad, expected.is_inference()), where
        rtol, atol = TOLERANCES.get(expected.dtype, (0, 0))
        # An entry that lost its digits to cancellation is judged by the largest one.
        finite = expected.detach()[expected.detach().isfinite()] if expected.layout is torch.strided else expected[:0]
        atol *= max(1.0, float(finite.abs().max())) if expected.is_floating_point() and finite.numel() else 1.0
        torch.testing.assert_close(
            got, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=False, msg=lambda m: f"{where}: {m}"
        )
    elif isinstance(expected, float):
        assert math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-9), f"{where}: {got!r}, not {expected!r}"
    else:
        assert got == expected, f"{where}: {got!r}, not {expected!r}"
