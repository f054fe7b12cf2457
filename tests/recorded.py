"""A stand-in for a CUDA graph on the CPU: what torch's dispatcher saw is what a replay runs, into the same tensors."""

from __future__ import annotations

import contextlib
import random

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing\n")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class _Waits(TorchDispatchMode):
    def __init__(self, places):
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        picked = func is torch.ops.aten.index.Tensor and any(x is not None and x.dtype is torch.bool for x in args[1])
        if picked or func is torch.ops.aten._local_scalar_dense.default:
            self.places.append("train.py:1")
        return func(*args, **(kwargs or {}))


def _storages(tree) -> set[int]:
    found = set()
    for x in tree_leaves(tree):
        if isinstance(x, Tensor) and x.layout is torch.sparse_csr:
            found |= _storages([x.crow_indices(), x.col_indices(), x.values()])
        elif _is_dense(x):
            found.add(x.untyped_storage().data_ptr())
    return found


def _is_dense(x) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided


class Recording:
    memory_bytes = 0

    pool = staticmethod(lambda: None)
    most_bytes = staticmethod(lambda: 1 << 40)

    def __init__(self, tensors, pool=None):
        self._tensors = tensors
        self._calls: list = []

    takes = staticmethod(lambda tensor: True)
    busy = staticmethod(lambda: False)
    unfit = staticmethod(lambda tensors: None if tensors else "its tensors are on the CPU")
    warming = staticmethod(contextlib.nullcontext)
    follow = staticmethod(lambda: None)
    scalar = staticmethod(torch.tensor)
    host_random = staticmethod(random.getstate)  # torch's own stands for the GPU's here

    @staticmethod
    @contextlib.contextmanager
    def watching():
        places: list[str] = []
        with _Waits(places):
            yield places

    def record(self, function):
        """As a CUDA graph: runs on the host alone, so that no value of a tensor is another afterwards."""
        kept = [(x, x.detach().clone(), x.grad, None if x.grad is None else x.grad.clone()) for x in self._tensors]
        random, tape = torch.get_rng_state(), _Tape()
        try:
            with tape:
                return function()
        finally:
            self._calls = tape.calls
            torch.set_rng_state(random)
            for x, value, grad, grad_value in kept:
                x.data.copy_(value)  # no new version, as nothing was written
                if grad is not None:
                    grad.data.copy_(grad_value)

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, out in self._calls:
                made = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(made), strict=True):
                    if _is_dense(old) and not _storages(old) & _storages((args, kwargs)):
                        old.copy_(new)
