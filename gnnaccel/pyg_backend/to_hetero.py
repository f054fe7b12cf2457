"""Models of to_hetero(): the copies of a layer for each edge type are called together; and of to_hetero_with_bases(),
for bases.py.

to_hetero() writes a torch.fx.GraphModule that calls the copies one after the other and adds their results in pairs. Of
its graph another forward() is made beside its own, in which the calls of one layer's copies, and the additions that
take nothing else, are one call of ours: the module, its graph and its code stay as they are, and so do the modules in
it, which are looked up in each call. What does not look like that is left as it is.
"""

from __future__ import annotations

import functools
import operator
import time
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch_geometric.nn.conv import MessagePassing

from gnnaccel import report, touch
from gnnaccel.pyg_backend import bases, edge_types
from gnnaccel.pyg_backend.classes import is_accelerated
from gnnaccel.pyg_backend.edge_type_layers import Refused
from gnnaccel.pyg_backend.edge_types import Call, Operands

KIND = "pyg.to_hetero"
_patches = touch.Patches()
_PARENTS = (torch.nn.ModuleDict, torch.nn.Module)  # the latter in copies of a GraphModule


def enable() -> None:
    """Have models of to_hetero() that are made or copied from now on call their layers together; does nothing the
    second time."""
    if not _patches:
        _patches.put(fx.GraphModule, "recompile", _then_install)


def disable() -> None:
    """Undo `enable`: models that live go back to their own forward() at their next call."""
    _patches.undo()


def _then_install(original: Callable) -> Callable:
    @functools.wraps(original)
    def recompile(self):
        code = original(self)
        install(self)
        return code

    return recompile


def install(module: fx.GraphModule) -> None:
    """Have one model call its layers together; does nothing to one that does, or of another kind."""
    cls: Any = type(module)
    plain = cls.__dict__.get("forward")
    if plain is None or hasattr(plain, "_gnnaccel_plain") or not isinstance(getattr(module, "graph", None), fx.Graph):
        return
    if touch.codegen_of(module.graph) is None:
        return
    groups = _groups(module)
    if groups or any(_replaced(node) is not node.target for node in module.graph.nodes):
        cls.forward = _forward(plain, _compiled(module.graph, groups))
        cls.__prepare_scriptable__ = _prepare_scriptable


def _forward(plain: Callable, together: Callable) -> Callable:
    @functools.wraps(plain)
    def forward(self, *args, **kwargs):
        if not _patches or torch.compiler.is_compiling() or touch.tracing() or _are_traced(args, kwargs):
            return plain(self, *args, **kwargs)
        return together(self, *args, **kwargs)

    forward._gnnaccel_plain = plain  # type: ignore[attr-defined]
    return forward


def _are_traced(args: tuple, kwargs: dict) -> bool:
    return any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values()))


def _prepare_scriptable(self):
    """What torch.jit.script compiles instead: the same model with its own forward()."""
    other = fx.GraphModule.__new__(fx.GraphModule)
    vars(other).update(vars(self))
    type(other).forward = type(self).forward._gnnaccel_plain
    report.fallback(KIND, "torch.jit.script")
    return other


class _Group:
    """Calls of a layer's copies, in their order, and which of them are added up: `sums`, in pairs as to_hetero()
    does, each in place of a node of the graph."""

    def __init__(self, calls: list[fx.Node], sums: dict[fx.Node, list[fx.Node]], inner: set[fx.Node]):
        self.calls, self.sums, self.inner = calls, sums, inner


def _groups(module: fx.GraphModule) -> list[_Group]:
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    runs: dict[str, list[list[fx.Node]]] = {}
    for node in order:
        parent = _parent(module, node)
        if parent is not None:
            found = runs.setdefault(parent, [[]])
            if any(node.target == other.target for other in found[-1]):  # a layer that is called again
                found.append([])
            found[-1].append(node)
    made = [_group(calls, order) for found in runs.values() for calls in found if len(calls) > 1]
    return [group for group in made if group is not None]


def _parent(module: fx.GraphModule, node: fx.Node) -> str | None:
    """The name of what holds the copies of a layer, for the call of one."""
    if node.op != "call_module":
        return None
    parent, _, _ = str(node.target).rpartition(".")
    try:
        called = isinstance(module.get_submodule(str(node.target)), MessagePassing)
        return parent if parent and called and type(module.get_submodule(parent)) in _PARENTS else None
    except AttributeError:
        return None


def _group(calls: list[fx.Node], order: dict[fx.Node, int]) -> _Group | None:
    """None for calls that depend on each other, or whose results are asked for before the last of them."""
    last = max(order[call] for call in calls)
    if any(order[user] <= last for call in calls for user in call.users):
        return None
    sums: dict[fx.Node, list[fx.Node]] = {call: [call] for call in calls}
    inner: set[fx.Node] = set()
    for node in order:
        if node.op != "call_function" or node.target is not torch.add or len(node.args) != 2 or node.kwargs:
            continue
        a, b = node.args  # type: Any, Any
        if a is b or any(not isinstance(x, fx.Node) or x not in sums or len(x.users) != 1 for x in (a, b)):
            continue
        sums[node] = sums.pop(a) + sums.pop(b)
        inner |= {a, b}
    return _Group(calls, sums, inner)


def _compiled(graph: fx.Graph, groups: list[_Group]) -> Callable:
    """forward(self, ...) of a graph with these groups."""
    ends = {max(group.calls, key=list(graph.nodes).index): group for group in groups}
    gone = {node for group in groups for node in (*group.calls, *group.sums, *group.inner)}
    new, known = fx.Graph(), {}  # type: fx.Graph, dict[fx.Node, fx.Node]
    new.set_codegen(touch.codegen_of(graph))
    for node in graph.nodes:
        if node in ends:
            _emit(new, known, ends[node])
        elif node not in gone:
            known[node] = new.node_copy(node, lambda other: known[other])
            known[node].target = _replaced(node)
    code = new.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, "<gnnaccel: to_hetero>", "exec"), namespace)  # as torch.fx makes its forward()
    return namespace["forward"]


def _replaced(node: fx.Node) -> Any:
    """What a node calls, or ours in its place."""
    target: Any = node.target
    return bases.REPLACED.get(target, target) if isinstance(target, types.FunctionType) else target


def _emit(new: fx.Graph, known: dict, group: _Group) -> None:
    modules = tuple([new.get_attr(str(call.target)) for call in group.calls])
    args = [fx.map_arg((call.args, call.kwargs), lambda other: known[other]) for call in group.calls]
    places = {call: number for number, call in enumerate(group.calls)}
    targets = [0] * len(group.calls)
    for number, members in enumerate(group.sums.values()):
        for call in members:
            targets[places[call]] = number
    out = new.call_function(_together, (modules, tuple(args), tuple(targets)))
    for number, node in enumerate(group.sums):
        known[node] = new.call_function(operator.getitem, (out, number))


def _together(modules: Sequence[Any], given: Sequence[tuple[tuple, dict]], targets: Sequence[int]) -> list[Any]:
    """The sums of what modules[i](*args, **kwargs) gives with args, kwargs = given[i], of those i that have one
    target."""

    def run(number: int) -> Any:
        args, kwargs = given[number]
        return modules[number](*args, **kwargs)

    start, why = time.perf_counter(), None
    if any(map(is_accelerated, modules)):
        why = edge_types.unusual()
        if why is None:
            calls = [Call(*each) for each in zip(modules, targets, map(_operands, given), strict=True)]
            found = edge_types.found_in(calls)
            if isinstance(found, Refused):
                why = found.why
            else:
                results = edge_types.results_of(calls, found, run)
                if results is not None:
                    report.record(KIND, start)
                    return [_added([*results[n].parts, *results[n].others]) for n in range(len(results))]
        if why is not None:
            report.record(KIND, start, why)  # each layer is accelerated, or left, and counted by itself
    by_target: list[list[Any]] = [[] for _ in range(max(targets) + 1)]
    for number, target in enumerate(targets):
        by_target[target].append(run(number))
    return [_added(outs) for outs in by_target]


def _added(outs: list[Any]) -> Any:
    """Added up in the order in which to_hetero() does."""
    queue = deque(outs)
    while len(queue) > 1:
        queue.append(torch.add(queue.popleft(), queue.popleft()))
    return queue[0]


def _operands(given: tuple[tuple, dict]) -> Operands | None:
    """What a layer is called with that gets features and edges alone, and perhaps weights of these."""
    args, kwargs = given
    weight = args[2] if len(args) == 3 else None
    for name, value in kwargs.items():
        if value is None:
            continue
        if name != "edge_weight" or weight is not None:
            return None
        weight = value
    if len(args) not in (2, 3):
        return None
    x, edges = args[:2]
    if isinstance(x, tuple):
        return Operands(*x, edges, False, weight) if len(x) == 2 else None
    return Operands(x, x, edges, True, weight)
