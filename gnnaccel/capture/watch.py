"""What a step does while it is watched and captured: rows picked by a mask, and modules set to train or evaluate."""

from __future__ import annotations

import builtins
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnnaccel import touch
from gnnaccel.lazy.tensor import Lazy


class Masks(TorchFunctionMode):
    """Rows picked by a mask that does not change are picked by number: x[mask] waits for how many they are.

    tensors : those of which masks are known to last. found : by id, a mask, its version, and the numbers of its rows.
    """

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self._lasting = {id(x) for x in tensors if x.dtype is torch.bool}
        self.found: dict[int, tuple[Tensor, int, tuple[Tensor, ...]]] = {}

    def tensors(self) -> set[int]:
        return set(self.found)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (Tensor.__getitem__, Tensor.__setitem__) and len(args) > 1:
            args = (args[0], self._numbered(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))

    def _numbered(self, index: Any) -> Any:
        if isinstance(index, Tensor):
            rows = self._rows(index)
            return index if rows is None else rows
        if isinstance(index, tuple) and any(isinstance(part, Tensor) for part in index):
            made: list = []
            for part in index:
                rows = self._rows(part) if isinstance(part, Tensor) else None
                made.extend((part,) if rows is None else rows)
            return tuple(made)
        return index

    def _rows(self, mask: Tensor) -> tuple[Tensor, ...] | None:
        if mask.dtype is not torch.bool or id(mask) not in self._lasting:
            return None
        known = self.found.get(id(mask))
        if known is None or known[1] != mask._version:
            with _waiting():
                known = self.found[id(mask)] = (mask, mask._version, mask.nonzero(as_tuple=True))
        return known[2]


class Watch(Masks):
    """`Masks`; hooks: names of what was called that a replay would leave out."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__(tensors)
        self.hooks: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _LEFT_OUT and not (args and isinstance(args[0], Lazy)):  # whose hooks are our own
            self.hooks.append(_LEFT_OUT[func])
        return super().__torch_function__(func, types, args, kwargs)


# What is captured goes the way that it goes uncaptured.
touch.BLIND_MODES |= {Masks, Watch}
_LEFT_OUT = {
    Tensor.register_hook: "register_hook()",
    Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook()",
    Tensor.retain_grad: "retain_grad()",
    Tensor.backward: "backward()",
    Tensor.grad.__get__: "grad",  # type: ignore[union-attr]  # memory that is another at each call
}


@contextlib.contextmanager
def speaking() -> Iterator[list[str]]:
    """Gives what was called in the block that speaks to the user: print(), or a logger that has something to do."""
    said: list[str] = []
    say, log = builtins.print, logging.Logger.callHandlers

    def print_(*args, **kwargs):
        said.append("print()")
        say(*args, **kwargs)

    def call_handlers(self, record):
        if not self.name.startswith("gnnaccel"):
            said.append(f"the logger {self.name}")
        log(self, record)

    builtins.print, logging.Logger.callHandlers = print_, call_handlers  # type: ignore[method-assign]
    try:
        yield said
    finally:
        builtins.print, logging.Logger.callHandlers = say, log  # type: ignore[method-assign]


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """The host may wait for the GPU in here, unseen."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def modules_set() -> Iterator[list[torch.nn.Module]]:
    """Gives the modules whose train() or eval() is called in the block."""
    seen: dict[int, torch.nn.Module] = {}
    original = torch.nn.Module.train

    def train(module: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
        seen[id(module)] = module
        return original(module, mode)

    found: list[torch.nn.Module] = []
    torch.nn.Module.train = train  # type: ignore[assignment,method-assign]
    try:
        yield found
    finally:
        torch.nn.Module.train = original  # type: ignore[method-assign]
        found.extend(seen.values())
