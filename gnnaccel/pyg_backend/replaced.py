"""A forward() of ours in a module class of PyG's that passes no messages itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Forward:
    """The forward() of class `cls`, which make(PyG's own) stands in for while it is enabled."""

    def __init__(self, cls: Any, make: Callable[[Callable], Callable]):
        self._cls, self._make = cls, make
        self._original: Callable | None = None
        self._ours: Callable | None = None

    def enable(self) -> None:
        """Put ours into the class; does nothing the second time, or where somebody has put in another one."""
        found = self._cls.forward
        if self._ours is None and found.__module__ == self._cls.__module__ and not hasattr(found, "__wrapped__"):
            self._original, self._ours = found, self._make(found)
            self._cls.forward = self._ours

    def disable(self) -> None:
        """Put PyG's own back; does nothing where somebody has put another one over ours, which then runs ours."""
        if self._ours is not None and self._cls.forward is self._ours:
            self._cls.forward = self._original
            self._original = self._ours = None
