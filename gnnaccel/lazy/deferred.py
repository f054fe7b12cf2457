"""Tensors that exist as what they are to be computed of, until somebody does with them what no rule knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

METADATA: set = set()  # functions that ask for nothing but shape, type and place; filled by rules.py


class Deferred(Tensor):
    """A tensor of which functions of torch that have a rule make another one; all others get an ordinary tensor.

    RULES : torch function -> rule(function, *args, **kwargs), whose result is DECLINED where an ordinary tensor is
        needed, and so it is where the rule raises one of UNSUITED.
    """

    RULES: ClassVar[dict[Any, Callable]]
    DECLINED: ClassVar[Any] = None
    UNSUITED: ClassVar[tuple[type[Exception], ...]] = (TypeError,)

    def ordinary(self, reason: str) -> Tensor:
        """What it stands for; `reason`: the function that is to have it."""
        raise NotImplementedError

    def given(self, reason: str) -> Tensor:
        """The same for a function that torch is called by."""
        return self.ordinary(reason)

    def loses_gradient(self) -> bool:
        """True if autograd would record an operation on this object instead of on what it stands for."""
        raise NotImplementedError

    @staticmethod
    def lost(_grad: Any = None) -> None:
        """Raise RuntimeError: that has happened."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = cls.RULES.get(func)
        if rule is not None:
            try:
                out = rule(func, *args, **kwargs)
            except cls.UNSUITED:
                out = cls.DECLINED
            if out is not cls.DECLINED:
                return out
        reason = f"{getattr(func, '__name__', func)}()"
        args, kwargs = tree_map_only(cls, lambda x: x.given(reason), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if torch.is_grad_enabled() and any(isinstance(a, cls) and a.loses_gradient() for a in args):
            cls.lost()
        args, kwargs = tree_map_only(cls, lambda x: x.ordinary(str(func)), (args, kwargs or {}))
        return func(*args, **kwargs)
