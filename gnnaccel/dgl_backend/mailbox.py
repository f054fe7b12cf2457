"""User-defined reduce functions that sum, average or take extrema of their mailbox: run once, on a mailbox not made.

DGL sorts nodes by their number of messages and calls the function once for each number, with a mailbox
[nodes, messages, ...]. Here it is called once with all nodes that have messages. What it reads is a `_Values`, which
knows what is done to each node alone: functions of a node's features, reductions over dimension 1 of the mailbox
(ops of ours), a softmax over it, and functions of each message before that. Anything else is `Refused`, as it may mix
nodes, or wants the messages side by side, and the function runs again, DGL's way.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel import touch
from gnnaccel.dgl_backend.structure import receivers
from gnnaccel.dgl_backend.touch import Column, Frame, NodeBatch, columns_of, frame_like, index_of, node_frames
from gnnaccel.lazy.deferred import METADATA
from gnnaccel.lazy.reduce import Unsupported, reduced, softmax, takes
from gnnaccel.lazy.rules import ELEMENTWISE
from gnnaccel.lazy.tensor import Lazy, Trip, lift


class Refused(BaseException):
    """The function does what is DGL's to run: the argument says what. No Exception, which the function could catch."""


class _Nodes(Trip):
    """Of features of nodes, "lifted" to themselves: what is done row by row goes on, and nobody gets rows."""

    def rows(self, lazy: Lazy, reason: str | None, always: bool) -> Tensor:
        raise Refused(f"a reduce function of nodes together: {reason}")


class _Box:
    """One call of a reduce function.

    trip : of the edges; nodes : of the nodes with messages; ids : which those are, None for all.
    """

    def __init__(self, g, trip: Trip):
        self.trip = trip
        self.ids, itself = receivers(index_of(g))
        self.nodes = _Nodes(itself)

    def of_nodes(self, value: Tensor) -> _Values:
        return _Values(self, value if isinstance(value, Lazy) else lift(self.nodes, "v", value, clean=True), False)

    def of_messages(self, value: Tensor) -> _Values:
        return _Values(self, value, True)

    def received(self, value: Tensor) -> _Values:
        """Of what every destination has [num_rows, ...], that of those with messages."""
        return self.of_nodes(value if self.ids is None else value.index_select(0, self.ids))

    def sent(self, values: _Values) -> Tensor:
        """The values of nodes [nodes, 1, ...] at the destination of each edge, lifted."""
        value = values.plain().squeeze(1)
        if self.ids is not None:
            full = value.new_zeros(self.trip.graph.num_rows, *value.shape[1:])
            value = full.index_copy(0, self.ids, value)
        return lift(self.trip, "v", value)

    @functools.cached_property
    def degree(self) -> Tensor:
        count = self.trip.graph.indptr.diff()
        return (count if self.ids is None else count.index_select(0, self.ids)).double()


class _Values(Tensor):
    """Something of each node [nodes, ...] or of each message [nodes, messages, ...]; see the head of this file.

    held : a Lazy of `_Nodes`, or one of the edges, or their rows [edges, ...].
    """

    box: _Box
    held: Tensor
    is_mail: bool

    @staticmethod
    def __new__(cls, box: _Box, held: Tensor, mail: bool):
        shape = (box.nodes.graph.nnz, *((1,) if mail else ()), *held.shape[1:])
        self = touch.make_wrapper(cls, shape, dtype=held.dtype, device=held.device)
        self.box, self.held, self.is_mail = box, held, mail
        return self

    def plain(self) -> Tensor:
        """The values of nodes as an ordinary tensor."""
        assert isinstance(self.held, Lazy) and not self.is_mail
        found = self.held.expression
        if hasattr(found, "value"):
            return found.value
        with torch.set_grad_enabled(self.held.traced):
            return Trip.rows(self.box.nodes, self.held, None, False)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        flat = touch.pytree.tree_flatten((args, kwargs))[0]
        box = next(x.box for x in flat if isinstance(x, (_Values, Degree)))
        if any(isinstance(x, _Values) and x.is_mail for x in flat):
            return _of_mail(box, func, args, kwargs)
        if any(isinstance(x, Degree) for x in flat):
            dims = max(x.dim() for x in flat if isinstance(x, Tensor))
            dtype = next(x.dtype for x in flat if isinstance(x, Tensor))
            args, kwargs = touch.pytree.tree_map_only(Degree, lambda x: x.beside(dims, dtype), (args, kwargs))
        args, kwargs = touch.pytree.tree_map_only(_Values, lambda x: x.held, (args, kwargs))
        return _of_results(box, func(*args, **kwargs))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise Refused(f"{func} of a reduce function")


_Values.__name__ = _Values.__qualname__ = "Tensor"


def _of_results(box: _Box, out):
    if isinstance(out, Tensor) and not isinstance(out, Lazy) and out.shape[:1] != (box.nodes.graph.nnz,):
        raise Refused("a reduce function of nodes together")
    return touch.pytree.tree_map_only(Tensor, box.of_nodes, out)


class _Unseen:
    """A result that is DGL's to find, if the function does anything with it."""

    def __init__(self, what: str):
        object.__setattr__(self, "_what", what)

    def _refuse(self, *args, **kwargs):
        raise Refused(f"{object.__getattribute__(self, '_what')} in a reduce function")

    __getattr__ = __getitem__ = __len__ = __iter__ = __bool__ = __index__ = __int__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __pow__ = __hash__ = _refuse  # type: ignore
    __torch_function__ = _refuse


class Degree:
    """The number of messages, which a function reads as a number: it differs from node to node here.

    What would need one number, such as a loop or a comparison, raises.
    """

    def __init__(self, box: _Box, value: Tensor):
        self.box, self.value = box, value

    def beside(self, dims: int, dtype: torch.dtype) -> Lazy:
        """As a feature of nodes that broadcasts as a number does."""
        value = self.value.to(dtype if dtype.is_floating_point else torch.get_default_dtype())
        return lift(self.box.nodes, "v", value.view(-1, *(1,) * (dims - 1)), clean=True)

    def _with(self, function, other):
        if isinstance(other, Tensor):
            return NotImplemented
        other = other.value if isinstance(other, Degree) else other
        if not isinstance(other, (int, float, Tensor)):
            return NotImplemented
        return Degree(self.box, function(self.value, other))

    def __add__(self, other):
        return self._with(torch.add, other)

    def __mul__(self, other):
        return self._with(torch.mul, other)

    def __sub__(self, other):
        return self._with(torch.sub, other)

    def __truediv__(self, other):
        return self._with(torch.div, other)

    def __pow__(self, other):
        return self._with(torch.pow, other)

    def __rsub__(self, other):
        return self._with(lambda a, b: b - a, other)

    def __rtruediv__(self, other):
        return self._with(lambda a, b: b / a, other)

    __radd__, __rmul__ = __add__, __mul__
    __torch_function__ = _Values.__torch_function__

    def _refuse(self, *args):
        raise Refused("a reduce function that branches on the number of messages")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _refuse  # type: ignore[assignment]

    def log(self) -> Degree:  # what numpy.log() calls
        return Degree(self.box, self.value.log())

    def sqrt(self) -> Degree:
        return Degree(self.box, self.value.sqrt())


def _spelled(*names: str, holders=(torch, Tensor)) -> dict[Any, str]:
    return {getattr(h, name): name for name in names for h in holders if hasattr(h, name)}


_REDUCTIONS = _spelled("sum", "mean", "max", "min", "amax", "amin")
_SOFTMAX = _spelled("softmax", holders=(torch, Tensor, F))
_SHAPE, _NDIM = Tensor.shape.__get__, Tensor.ndim.__get__  # type: ignore[attr-defined]
_SHAPES = {Tensor.size, _SHAPE, torch.numel, Tensor.numel, Tensor.nelement, Tensor.__len__}
_DIMS = {Tensor.dim, Tensor.ndimension, _NDIM}
# Functions of each message, which take a dimension of its features.
_BY_FEATURES = _spelled("unsqueeze", "squeeze")


def _of_mail(box: _Box, func, args: tuple, kwargs: dict):
    """func(*args, **kwargs), of which some are messages."""
    mail = next(x for x in touch.pytree.tree_flatten((args, kwargs))[0] if isinstance(x, _Values) and x.is_mail)
    dims = mail.held.dim() + 1
    if func in _DIMS:
        return dims
    if func in _SHAPES:
        return _shape_of(box, func, mail, *args[1:], **kwargs)
    if func in METADATA:
        return func(mail.held)
    if args and args[0] is mail:
        if func in _REDUCTIONS:
            return _reduced(box, func, mail, *args[1:], **kwargs)
        if func in _SOFTMAX:
            dim, rest = _dim_of(args[1:], kwargs)
            if dim == (1,) or dim == (1 - dims,):
                if not rest.keys() <= {"_stacklevel", "dtype"} or rest.get("dtype") is not None or not takes(mail.held):
                    raise Refused("softmax() with options in a reduce function")
                return box.of_messages(softmax(box.trip.graph, mail.held))
        if func in _BY_FEATURES and len(args) == 2 and not kwargs and isinstance(args[1], int):
            more = _BY_FEATURES[func] == "unsqueeze"
            at = args[1] % (dims + more) if -dims - more <= args[1] < dims + more else 0
            if at > 1:
                return box.of_messages(func(mail.held, at - 1))
        if func is Tensor.__getitem__ and _is_of_features(args[1]):
            return box.of_messages(mail.held[args[1][1:]])
    if func in ELEMENTWISE:
        return box.of_messages(func(*(_at_edges(box, x, mail) for x in args), **kwargs))
    raise Refused(f"{getattr(func, '__name__', func)}() of a mailbox")


def _is_of_features(key) -> bool:
    """True for [:, :, ...] of numbers and slices."""
    whole = isinstance(key, tuple) and key[:2] == (slice(None),) * 2
    return whole and all(isinstance(k, (int, slice)) and not isinstance(k, bool) for k in key)


def _shape_of(box: _Box, func, mail: _Values, dim: int | None = None):
    count: Any = _Unseen("the number of nodes")
    shape = (count, Degree(box, box.degree), *mail.held.shape[1:])
    if func is Tensor.size and dim is not None:
        return shape[dim]
    return shape if func in (Tensor.size, _SHAPE) else count


def _dim_of(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The dimensions that a function is told to work along, and its other options by name."""
    rest = dict(kwargs)
    names = [name for name in ("dim", "axis") if name in rest]
    dim = args[0] if args else rest.pop(names[0]) if names else None
    if len(args) > 1:
        rest["keepdim"] = args[1]
    if len(args) > 2:
        rest["dtype"] = args[2]
    return (tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)), rest


def _reduced(box: _Box, func, mail: _Values, *args, **kwargs):
    """A reduction over the messages of each node, or over features of each message."""
    name, dims = _REDUCTIONS[func], mail.held.dim() + 1
    along, rest = _dim_of(args, kwargs)
    if not all(isinstance(d, int) and -dims <= d < dims for d in along) or rest.keys() - {"keepdim"}:
        raise Refused(f"{name}() of a mailbox, of other arguments than a dimension")
    along = tuple(d % dims for d in along)
    if name not in ("max", "min") and min(along) > 1:
        return box.of_messages(func(mail.held, dim=tuple(d - 1 for d in along), **rest))
    if along != (1,):
        raise Refused(f"{name}() of a mailbox along dimension {along}")
    try:
        out: Tensor = box.received(reduced(box.trip.graph, mail.held, name))
    except Unsupported as error:
        raise Refused(f"{name}() of a mailbox of {mail.held.dtype}") from error
    out = out.unsqueeze(1) if rest.get("keepdim") else out
    if name not in ("max", "min"):
        return out
    return getattr(torch.return_types, name)((out, _Unseen("where in the mailbox an extremum is")))


def _at_edges(box: _Box, x, mail: _Values):
    """An operand beside messages, as one beside the edges."""
    dims = mail.held.dim() + 1
    if isinstance(x, Degree):
        x = box.of_nodes(x.beside(dims, mail.held.dtype))
    if isinstance(x, _Values):
        if x.is_mail and x.held.dim() + 1 == dims:
            return x.held
        if not x.is_mail and x.held.dim() == dims and x.held.shape[1] == 1:
            return box.sent(x)
    elif not isinstance(x, Tensor) or x.dim() <= dims - 2:
        return x
    raise Refused("operands of other shapes beside a mailbox")


class _Column(Column):
    """A feature of the nodes with messages."""

    def __init__(self, box: _Box, column: Column):
        super().__init__(column.storage, column.scheme)
        self._box, self._column = box, column

    @property
    def data(self):
        value = self._column.data
        if type(value) not in (Tensor, torch.nn.Parameter) or not value.is_floating_point():
            raise Refused(f"a reduce function that reads features of {value.dtype}")  # what is done to them is not seen
        return self._box.received(value)

    @data.setter
    def data(self, value):
        raise Refused("a reduce function that writes into features of nodes")


class _Batch(NodeBatch):
    """The nodes with messages. How many they are, and which, differs from DGL's batches."""

    def __init__(self, g, box: _Box, messages: dict):
        frame = node_frames(g)[g.get_ntype_id_from_dst(g.dsttypes[0])]
        data = Frame(num_rows=box.nodes.graph.nnz)
        columns_of(data).update({name: _Column(box, column) for name, column in columns_of(frame).items()})
        super().__init__(g, None, g.dsttypes[0], data, msgs=messages)

    def nodes(self):
        raise Refused("a reduce function that reads which nodes it is given")

    def batch_size(self):
        raise Refused("a reduce function that reads how many nodes it is given")


_refusals: weakref.WeakKeyDictionary = (
    weakref.WeakKeyDictionary()
)  # code -> {None: reason}, object -> {code of a method: reason}


def reduce(g, trip: Trip, function, messages) -> Frame:
    """What core.invoke_udf_reduce returns for a user's reduce function.

    messages : dict of Tensor [edges, ...], some of them lazy features of `trip`

    Raises
    ------
    Refused
        If DGL must run the function.
    """
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    owner = getattr(function, "__self__", None)
    known, method = (_known(code), None) if owner is None else (_known(owner), code)
    if method in known:
        raise Refused(known[method])
    if not isinstance(messages, dict) or not all(
        takes(x) and x.dim() > 0 and x.shape[0] == trip.graph.nnz for x in messages.values()
    ):
        raise Refused("messages that are no features of edges in floating point")
    box, state = _Box(g, trip), _random_state(trip.graph.device)
    try:
        mail = {name: box.of_messages(x) for name, x in messages.items()}
        found = {name: _made(x) for name, x in dict(function(_Batch(g, box, mail))).items()}
    except (Refused, Exception) as error:  # an error of the user's comes again, from DGL's own run
        _restore(state)
        why = str(error) if isinstance(error, Refused) else "a reduce function that raises an error"
        known[method] = why
        raise Refused(why) from None
    return _frame(g, box, found)


def _known(owner) -> dict:
    """Of functions of this owner, why they were refused, by their code: what they do is not tried each time."""
    try:
        return _refusals.setdefault(owner, {})
    except TypeError:  # one that cannot be referred to weakly
        return {}


def _made(x) -> Tensor:
    if not isinstance(x, _Values) or x.is_mail:
        raise Refused("a reduce function that returns something else than features of nodes")
    return x.plain()


def _random_state(device: torch.device) -> tuple:
    on_gpu = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    return torch.get_rng_state(), (torch.cuda.get_rng_state(device) if on_gpu else None), device


def _restore(state: tuple) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], state[2])


def _frame(g, box: _Box, found: dict) -> Frame:
    """The results as DGL's own invoke_udf_reduce returns them: of nodes without messages what a new feature has."""
    given = node_frames(g)[g.get_ntype_id_from_dst(g.dsttypes[0])]
    out = frame_like(given, g.num_dst_nodes())
    if box.ids is None:
        for name, value in found.items():
            out.update_column(name, value)
    else:
        out.update_row(box.ids, found)
    return out
