"""Whether a layer's own code may be handed lazy features: only where torch sees all that is done to them.

That is the code that message(), aggregate(), update() and edge_update() reach, and gnnaccel.lazy.trust that looks
through it.
"""

from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple

from torch_geometric.nn.conv import MessagePassing

from gnnaccel import subclass, touch
from gnnaccel.lazy.trust import DATA, Walk, is_known
from gnnaccel.touch import submodules

ROOTS = ("message", "aggregate", "update", "edge_update")
_TRUSTED = ("torch.nn.", "torch_geometric.")  # modules whose forward() writes in place only if told to


def distrust(conv: MessagePassing) -> str | None:
    """Why the code of this layer cannot be looked through, or None if it can."""
    plain = subclass.plain_of(conv)
    found = _of_methods(plain, *[getattr(plain, name, None) for name in ROOTS])
    if found.reason is not None:
        return found.reason
    # Walked at each call: what a layer holds may be replaced, and told to write in place, between two of them.
    if not found.is_pygs:
        state = vars(conv)
        for name in found.names.intersection(state):
            if type(state[name]) not in DATA and (reason := _of_attribute(plain, found, name, state[name])):
                return reason
    return _of_submodules(conv, found.is_pygs)


def _of_submodules(conv: MessagePassing, is_pygs: bool) -> str | None:
    if touch.has_global_backward_hooks():
        return "backward hooks on all modules"
    parts, seen = [conv], {id(conv)}
    for module in parts:
        for part in submodules(module).values():
            if part is None or id(part) in seen:
                continue
            if not type(part).__module__.startswith(_TRUSTED):
                return f"a submodule of class {type(part).__name__}, which cannot be looked through"
            if not is_pygs and getattr(part, "inplace", False):
                return f"{type(part).__name__} writes in place"
            if touch.has_backward_hooks(part):  # which put an autograd function around it
                return f"a backward hook on {type(part).__name__}"
            seen.add(id(part))
            parts.append(part)
    return None


class _Found(NamedTuple):
    """What is known of the methods of a class.

    reason : why they cannot be looked through, or None.
    is_pygs : all of them are PyG's own, which keeps no view of what it writes to.
    names : of attributes that their code reads, as far as it is not PyG's.
    codes : that code.
    """

    reason: str | None
    is_pygs: bool
    names: frozenset[str]
    codes: tuple[types.CodeType, ...]


@functools.lru_cache(maxsize=1024)
def _of_methods(plain: Any, *methods) -> _Found:
    walk = Walk(plain)
    reason = walk.follow("a method", [method for method in methods if method is not None])
    is_pygs = all(is_known(MessagePassing if method is None else method) for method in methods)
    return _Found(reason, is_pygs, frozenset(walk.names), tuple(walk.codes))


def _of_attribute(plain: Any, found: _Found, name: str, value) -> str | None:
    """Why the attribute `name` of an instance, which the code reads, cannot be looked through."""
    walk = Walk(plain, codes=found.codes)
    return walk.follow(name, [value])
