"""Tensors that exist as what they are to be computed of, until somebody does with them what no rule knows."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from gnnaccel import touch

METADATA: set = set()  # functions that ask for nothing but shape, type and place; filled by rules.py


def references(held: list) -> list[int]:
    """How many references there are to each thing in a list, that of the list among them."""
    return list(map(sys.getrefcount, held))


IN_A_LIST = references([object()])[0]  # of what nobody else has


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

    def is_pythons_alone(self) -> bool:
        """True if nobody but Python has it, so that it can become another tensor."""
        with touch.plain_functions():
            return touch.is_pythons_alone(self) and not weakref.getweakrefs(self)

    def become(self, holder: dict[str, Any], grad: bool) -> None:
        """Be the ordinary tensor holder["value"]: the one that autograd knows, unless others have it, and then a view
        of it. What this object refers to is to be let go of before.

        grad : whether gradients were recorded where the ordinary tensor was made.
        """
        value = holder["value"]
        is_alone = references([value])[0] == IN_A_LIST + 2 and touch.is_pythons_alone(value)
        if not is_alone:
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                value = value.view_as(value)
        with touch.plain_functions():
            self._backward_hooks = None  # `lost`
            torch.utils.swap_tensors(self, value)
        if is_alone:
            holder["value"] = self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in METADATA:
            with touch.plain_functions():
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
        args, kwargs = touch.pytree.tree_map_only(cls, lambda x: x.given(reason), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if torch.is_grad_enabled() and any(isinstance(a, cls) and a.loses_gradient() for a in args):
            cls.lost()
        args, kwargs = touch.pytree.tree_map_only(cls, lambda x: x.ordinary(str(func)), (args, kwargs or {}))
        return func(*args, **kwargs)
