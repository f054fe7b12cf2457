"""Calls of accelerated layers that are running: a layer changes sides when none is.

Another thread may give a layer its own class back at any moment (`uninstall`). What one method of ours has begun, such
as attention weights that are not made yet, PyG's own next one could not take up.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch_geometric import is_compiling

_lock = threading.RLock()
_running: dict[int, int] = {}  # id of a layer -> calls; its callers keep it alive
_waiting: dict[int, Callable[[], None]] = {}  # what is to be done when the last one ends


def held(plain: Any, forward: Callable) -> Callable:
    """`forward` of accelerated layers of class `plain`, which stay accelerated until it ends."""

    @functools.wraps(forward)
    def method(self, *args, **kwargs):
        if is_compiling():
            return forward(self, *args, **kwargs)
        key = id(self)
        with _lock:
            ours = "_gnnaccel_plain" in vars(type(self))
            if ours:
                _running[key] = _running.get(key, 0) + 1
        if not ours:  # restored since the caller looked this method up
            return plain.forward(self, *args, **kwargs)
        try:
            return forward(self, *args, **kwargs)
        finally:
            _leave(key)

    return method


def _leave(key: int) -> None:
    with _lock:
        _running[key] -= 1
        if _running[key]:
            return
        del _running[key]
        change = _waiting.pop(key, None)
        if change is not None:
            change()


def when_idle(layer: Any, change: Callable[[], None]) -> None:
    """Call change() now, or at the end of the last call of `layer` that runs; the last such change counts."""
    with _lock:
        if id(layer) in _running:
            _waiting[id(layer)] = change
        else:
            change()


def stay(layer: Any) -> None:
    """Forget the change that waits for the calls of `layer` to end."""
    with _lock:
        _waiting.pop(id(layer), None)
