"""PyG's HeteroLinear, a linear map for each type of row, without pyg-lib: by rows sorted once, one node of autograd and
gradients of the inputs' size, where PyG's has a slice of its own for each type, which writes all rows."""

from __future__ import annotations

import functools
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel import report
from gnnaccel.ops.typed_matmul import typed_matmul
from gnnaccel.pyg_backend import short
from gnnaccel.pyg_backend.propagate import obstacle
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.touch import Patches

KIND = "pyg.HeteroLinear"
_DTYPES = (torch.float32, torch.float64)
_TYPES = (torch.int64, torch.int32)
_patches = Patches()
_chosen: weakref.WeakSet[Any] = weakref.WeakSet()  # layers of models that were handed to accelerate()
_every = False  # whether all are ours


def enable(every: bool = True) -> None:
    """Let HeteroLinear run on our op: every one, or those that `choose` was given."""
    global _every
    _every = _every or every
    if not _patches:
        _patches.put(pyg_nn.HeteroLinear, "forward", _forward)


def choose(layer: Any) -> None:
    """Let this layer run on our op."""
    _chosen.add(layer)
    enable(every=False)


def disable() -> None:
    """Undo `enable` and every `choose`."""
    global _every
    _every = False
    _chosen.clear()
    _patches.undo()


# What forward() of PyG 2.8 calls.
_NAIVE, _SEGMM = pyg_nn.HeteroLinear.forward_naive, getattr(pyg_nn.HeteroLinear, "forward_segmm", None)


def _forward(original: Callable) -> Callable:
    def forward(self, x, type_vec):
        if not _is_plain(self, x, type_vec):
            return original(self, x, type_vec)
        start = time.perf_counter()
        # HGTConv makes types that are sorted anew for each call.
        out = typed_matmul("HeteroLinear", "type_vec", x, type_vec, self.weight, self.bias, not self.is_sorted)
        report.record(KIND, start)
        return out

    # torch.jit.script compiles the original's source, which `wraps` leads it to, with this function's names.
    names = {**original.__globals__, **globals()}
    return functools.wraps(original)(types.FunctionType(forward.__code__, names, closure=forward.__closure__))


def _is_plain(layer: Any, x: Any, type_vec: Any) -> bool:
    if torch.compiler.is_compiling() or not (_every or layer in _chosen) or obstacle(layer) is not None:
        return False
    kind = type(layer)
    if kind.forward_naive is not _NAIVE or getattr(kind, "forward_segmm", None) is not _SEGMM:
        return False
    if not short.is_matrix(x) or type(type_vec) is not Tensor or type_vec.dtype not in _TYPES:
        return False
    given = [t for t in (layer.weight, layer.bias) if t is not None]
    if any(type(t) not in short.FEATURES or t.dtype != x.dtype or t.device != x.device for t in given):
        return False
    if x.dtype not in _DTYPES or torch.is_autocast_enabled(x.device.type):
        return False
    return x.shape[1] == layer.weight.shape[1] and type_vec.shape == x.shape[:1] and type_vec.device == x.device
