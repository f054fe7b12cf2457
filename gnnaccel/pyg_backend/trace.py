"""Reading a message(): is it a copy of x_j, or a weight times x_j?

The function is checked first (its code must depend on its arguments and on torch alone) and then run once with
torch.fx proxies. What comes out is either ``x_j`` itself or one product with ``x_j``; the other factor becomes a
little program that is run on edge-level tensors at each call. A plan holds for one pattern of None arguments,
since those are what a message() branches on.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch_geometric import utils

from gnnaccel import ops
from gnnaccel.pyg_backend.graph import Edges, Unsupported
from gnnaccel.pyg_backend.helpers import Call, bind, softmax, takes

SPECIAL = frozenset(("index", "ptr", "dim_size", "size_i", "size_j", "edge_index_i", "edge_index_j"))
_MULTIPLY = (torch.mul, torch.multiply, torch.ops.aten.mul)
_TRUSTED = ("torch", "torch_geometric", "math", "_operator", "operator")


@dataclass(frozen=True)
class Plan:
    """What a message() was found to be.

    feature : name of the lifted source feature ("x_j").
    weight : program computing the factor of it from `arguments`, or None for a copy.
    """

    feature: str
    weight: Callable | None = None
    arguments: tuple[str, ...] = ()


def refusal(function) -> str | None:
    """Why the code of `function` cannot be trusted to depend on its arguments and torch alone; None if it can."""
    if not isinstance(function, types.FunctionType) or function.__closure__ or hasattr(function, "__wrapped__"):
        return "message() is not a plain function"
    code = function.__code__
    if code.co_flags & 0x0C or any(isinstance(const, types.CodeType) for const in code.co_consts):
        return "message() has inner functions or variable arguments"
    owner = code.co_varnames[0] if code.co_argcount else None
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name.startswith("LOAD_FAST") and owner in (value if isinstance(value, tuple) else (value,)):
            return "message() reads the layer's attributes"
        if name.startswith(("STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE", "IMPORT", "YIELD")):
            return "message() has side effects"
        if name.startswith(("LOAD_GLOBAL", "LOAD_NAME")) and not _trusted(function.__globals__.get(value)):
            return f"message() uses {value!r}, which cannot be checked"
    return None


def _trusted(value) -> bool:
    """True for torch's own modules and functions: a trace of them stays true. Builtins look inside a proxy."""
    if isinstance(value, types.ModuleType):
        return value.__name__.split(".")[0] in _TRUSTED
    return callable(value) and str(getattr(value, "__module__", None)).split(".")[0] in _TRUSTED


def _softmax(src, index, ptr=None, num_nodes=None, dim=0):
    """torch_geometric.utils.softmax in a trace: one node, which runs on our kernel."""
    proxy = next(value for value in (src, index) if isinstance(value, fx.Proxy))
    return proxy.tracer.create_proxy("call_function", softmax, (src, index, ptr, num_nodes, dim), {})


def trace(function: types.FunctionType, names: tuple[str, ...], none: frozenset[str]) -> Plan:
    """The plan of a message() for the arguments `names`, of which those in `none` are None.

    Raises
    ------
    Unsupported
        With the reason why it is neither a copy nor a weighted copy.
    """
    reason = refusal(function)
    if reason is not None:
        raise Unsupported(reason)
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {name: fx.Proxy(graph.placeholder(name), tracer) for name in names if name not in none}
    run = bind(function, {utils.softmax: _softmax})
    try:
        out = run(None, **{name: proxies.get(name) for name in names})
    except Exception as error:  # whatever a proxy could not do: control flow, builtins, shapes
        raise Unsupported(f"message() could not be traced ({type(error).__name__})") from None
    if not isinstance(out, fx.Proxy):
        raise Unsupported("message() returns no tensor")
    return _read(graph, out.node)


def _is_source(node) -> bool:
    """True for a node that is an argument lifted from the sources."""
    name = str(node.target) if isinstance(node, fx.Node) and node.op == "placeholder" else ""
    return name.endswith("_j") and name not in SPECIAL


def _factors(node: fx.Node):
    """The two factors of a product, or None."""
    is_method = node.op == "call_method" and node.target in ("mul", "multiply")
    is_function = node.op == "call_function" and (node.target in _MULTIPLY or _name(node.target) == "mul")
    return tuple(node.args) if (is_method or is_function) and len(node.args) == 2 and not node.kwargs else None


def _name(target) -> str | None:
    return getattr(target, "__name__", None) if getattr(target, "__module__", None) == "_operator" else None


def _read(graph: fx.Graph, out: fx.Node) -> Plan:
    if _is_source(out):
        return Plan(str(out.target))
    factors = _factors(out)
    if factors is None:
        raise Unsupported("message() is neither a copy nor a weight times x_j")
    for feature, weight in (factors, factors[::-1]):
        # The factor must not read the wide feature itself, or its rows would be gathered after all.
        if _is_source(feature) and isinstance(weight, fx.Node) and feature not in _ancestors(weight):
            return Plan(str(feature.target), *_program(graph, out, weight))
    raise Unsupported("message() is neither a copy nor a weight times x_j")


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen, stack = set(), [node]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def _program(graph: fx.Graph, out: fx.Node, weight: fx.Node) -> tuple[Callable, tuple[str, ...]]:
    """The part of `graph` that computes `weight`, as a function, and the names of its arguments in order."""
    needed = _ancestors(weight)
    small = fx.Graph()
    kept: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in needed:
            kept[node] = small.node_copy(node, kept.__getitem__)
        elif node.op != "placeholder" and node is not out:
            raise Unsupported("message() computes more than its result")  # it may draw random numbers
    small.output(kept[weight])
    names = tuple(node.target for node in small.nodes if node.op == "placeholder")
    return fx.GraphModule(torch.nn.Module(), small).forward, names


def lifted(edges: Edges, name: str, value) -> Tensor | None:
    """The edge-level tensor of argument `name` ("z_i" or "z_j"), given the node-level one; gradients go by SpMM."""
    node = edges.node_feature(value, name[-2:])
    if node is None:
        return None
    if not takes(node):
        return node.index_select(0, edges.index(name[-2:]))
    graph = edges.graph()
    return ops.sddmm(graph, node, None, "copy_lhs", "u" if name.endswith("_j") else "v")


def run_weight(plan: Plan, edges: Edges, values: dict) -> Tensor:
    """The factor of x_j on each edge. `values` holds the propagate() arguments by name."""
    if plan.weight is None:
        raise Unsupported("message() has no weight")
    if len(plan.arguments) == 1 and plan.arguments[0] in values:  # an edge weight as it is
        return plan.weight(values[plan.arguments[0]])
    graph = edges.graph()
    call = Call(edges)
    arguments: list = []
    for name in plan.arguments:
        if name in ("index", "edge_index_i"):
            call.destinations = edges.index("_i") if call.destinations is None else call.destinations
            arguments.append(call.destinations)
        elif name == "edge_index_j":
            arguments.append(edges.index("_j"))
        elif name in ("dim_size", "size_i", "size_j"):
            arguments.append(graph.num_cols if name == "size_j" else graph.num_rows)
        elif name[-2:] in ("_i", "_j"):
            arguments.append(lifted(edges, name, values.get(name[:-2])))
        else:
            arguments.append(values.get(name))
    with call:
        return plan.weight(*arguments)
