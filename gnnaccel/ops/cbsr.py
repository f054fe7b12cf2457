"""CBSR: a tensor [N, D] of which each row keeps k entries, and which is a dense tensor to everybody else.

`maxk` makes one. Sums over a graph (`ops.spmm`, `ops.graph_conv`, and so the layers of DGL and PyG) read its k entries
a row; what else is done with it happens to the dense tensor that it stands for, made for that operation and dropped,
so that autograd keeps k entries and not D. It is autograd's own tensor: hooks, retain_grad, checkpoints and
torch.compile see it.

Kept compressed are copies, changes of dtype and device, products with a number or with one factor per row, ReLU,
negation and dropout. A view of it, or writing into it, makes the dense tensor for good: then there is memory to look
at.

Source: MaxK-GNN (Peng et al., ASPLOS 2024), "Compressed Balanced Sparse Row".
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _timed, touch
from gnnaccel.lower import bounds
from gnnaccel.ops.expand import collect, expand, places_dtype

aten = torch.ops.aten


RULES: dict[Any, Callable] = {}  # op -> rule(op, *args), which may return NotImplemented; filled by cbsr_rules.py


class _Parts:
    """What one CBSR and its aliases stand for: entries, or after a view or a write the dense tensor."""

    def __init__(self, values: Tensor, places: Tensor):
        self.values, self.places = values, places
        self.dense: Tensor | None = None
        self.version: int | None = None  # of the CBSR, which all aliases share, when a view of it was made
        self.stale = False  # the dense tensor has been written into

    def compressed(self, of: Tensor) -> bool:
        """True as long as nobody has written; `of`: the CBSR or any alias of it."""
        if not self.stale and self.version is not None:
            self.stale = of._version != self.version
        return not self.stale


class CBSR(Tensor):
    """A tensor [N, D], float, of which each row keeps k entries; the others are 0. See the head of this file.

    Notes
    -----
    An entry that is not kept is 0 whatever its row is multiplied with, be it infinite. torch.compile takes CBSR tensors
    in, through and out, but one that a compiled function returns must get a gradient from a sum over a graph: torch
    settles in advance which kind of tensor that will be. Let it return .to_dense() otherwise.
    """

    _parts: _Parts

    @staticmethod
    def __new__(cls, values: Tensor, places: Tensor, num_feats: int, parts: _Parts | None = None):
        self = touch.make_wrapper(cls, (values.shape[0], num_feats), dtype=values.dtype, device=values.device)
        self._parts = _Parts(values, places) if parts is None else parts
        return self

    def __init__(self, *args, **kwargs):
        pass

    # What torch.compile takes apart and puts together again.
    @property
    def _kept_values(self) -> Tensor:
        return self._parts.values

    @property
    def _kept_places(self) -> Tensor:
        return self._parts.places

    def __tensor_flatten__(self):
        if not self.is_compressed:
            raise RuntimeError("CBSR: torch.compile cannot take one that has been written into; pass it .to_dense()")
        return ["_kept_values", "_kept_places"], self.shape[1]

    @staticmethod
    def __tensor_unflatten__(inner, num_feats, outer_size, outer_stride):
        return CBSR(inner["_kept_values"], inner["_kept_places"], num_feats)

    @property
    def k(self) -> int:
        """Entries that a row keeps."""
        return self._parts.values.shape[1]

    @property
    def is_compressed(self) -> bool:
        """True as long as values() and indices() are what it holds: nobody has written into it."""
        return self._parts.compressed(self)

    def values(self) -> Tensor:
        """A copy of the entries [N, k], differentiable, in the order of `indices`. RuntimeError if it has been written
        into."""
        return self.entries().clone()

    def entries(self) -> Tensor:
        """The entries themselves, not to be written into."""
        return _Values.apply(self)

    def indices(self) -> Tensor:
        """A copy of the feature of each entry [N, k], ascending in a row; uint8 for up to 256 features, else uint16.
        RuntimeError if it has been written into."""
        return self.places().clone()

    def places(self) -> Tensor:
        """What `indices` copies: kernels trust it, so it is not to be written into."""
        if not self.is_compressed:
            raise RuntimeError("CBSR: it has been written into, and holds no entries any more; use .to_dense()")
        return self._parts.places

    def to_dense(self, dtype: torch.dtype | None = None, **_) -> Tensor:
        """The plain tensor [N, D] that it stands for, differentiable."""
        out = _Dense.apply(self)
        return out if dtype is None else out.to(dtype)

    def map_values(self, function) -> CBSR:
        """The CBSR whose entries are function(values), which keeps their shape and leaves 0 what is 0."""
        out: CBSR = compressed(function(self.entries()), self.places(), self.shape[1])
        return out

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.dropout and isinstance(args[0] if args else kwargs.get("input"), CBSR):
            out = _dropout(*args, **kwargs)
            if out is not None:
                return out
        if func is F.linear and not kwargs and isinstance(args[0], CBSR) and _maps_plainly(*args):
            return _Linear.apply(*args) if len(args) == 3 else _Linear.apply(*args, None)
        if func == _SET_DATA:  # another object each time
            raise RuntimeError("CBSR: its data cannot be replaced; use copy_(), or a new tensor")
        if func is Tensor.tolist:
            args = (args[0].to_dense(),)
        if func in _NEED_MEMORY and isinstance(args[0], CBSR) and type(args[0]._parts.values) is Tensor:
            if func is Tensor.numpy and args[0].requires_grad:
                raise RuntimeError(
                    "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
                )
            args[0]._parts.stale = True
            args = (_plain(args[0]), *args[1:])
        with touch.plain_functions():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.mul.Tensor and not isinstance(args[0], CBSR):
            args = (args[1], args[0])
        rule = RULES.get(func)
        if rule is not None and isinstance(args[0], CBSR) and args[0].is_compressed:
            out = rule(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        writes = touch.schema_of(func).is_mutable
        views = not writes and any(a.alias_info is not None for a in touch.schema_of(func).arguments)
        if not writes and not views:
            args, kwargs = touch.pytree.tree_map_only(CBSR, _dense, (args, kwargs))
            return func(*args, **kwargs)
        given = (args, kwargs)
        args, kwargs = touch.pytree.tree_map_only(CBSR, _plain if views else _written(func, given), given)
        if views:
            _watch(given[0][0])
        out = func(*args, **kwargs)
        return _returned(func, given, out) if writes else out

    def __repr__(self, *, tensor_contents=None):
        if type(self._parts.values) is Tensor:
            return super().__repr__(tensor_contents=tensor_contents)
        return f"CBSR(shape={tuple(self.shape)}, k={self.k})"  # while torch.compile traces: there are no numbers

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "CBSR: only tensors created explicitly by the user (graph leaves) support the deepcopy protocol; "
                "detach it"
            )
        with torch.no_grad():
            out = memo[id(self)] = self.clone()
        out.requires_grad_(self.requires_grad)
        if self.grad is not None:
            out.grad = copy.deepcopy(self.grad, memo)
        return out

    def __reduce_ex__(self, protocol):
        if not self.is_compressed:
            return _rebuild_dense, (self.detach().to_dense(), self.requires_grad)
        values, places = self._parts.values.detach(), self._parts.places
        return _rebuild, (values, places, self.shape[1], self.requires_grad)


def _rebuild(values: Tensor, places: Tensor, num_feats: int, requires_grad: bool) -> CBSR:
    """A saved CBSR, checked: kernels trust it, and a file may hold anything."""
    shapes = values.dim() == 2 and values.shape == places.shape and type(num_feats) is int
    if not shapes or not 1 <= values.shape[1] <= num_feats <= bounds.WIDEST_PLACES or values.dtype not in lib.DTYPES:
        raise ValueError("CBSR: what was saved is no CBSR tensor: wrong shapes or dtype")
    if places.dtype != places_dtype(num_feats) or values.device != places.device:
        raise ValueError("CBSR: what was saved is no CBSR tensor: wrong indices")
    if places.numel():
        wide = places.to(torch.int32)
        if int(wide.max()) >= num_feats or not bool((wide.diff(dim=1) > 0).all()):
            raise ValueError("CBSR: what was saved is no CBSR tensor: indices out of range or order")
    out = CBSR(values.contiguous(), places.contiguous(), num_feats)
    out.requires_grad_(bool(requires_grad))
    return out


def _rebuild_dense(dense: Tensor, requires_grad: bool) -> Tensor:
    return dense.requires_grad_(requires_grad)


if hasattr(torch.serialization, "add_safe_globals"):  # not in torch 2.4: torch.load wants weights_only=False there
    torch.serialization.add_safe_globals([_rebuild, _rebuild_dense])


def _dense(x: CBSR) -> Tensor:
    """The dense tensor, for reading."""
    parts = x._parts
    return expand(parts.values, parts.places, x.shape[1]) if parts.dense is None else parts.dense


def _plain(x: CBSR) -> Tensor:
    """The dense tensor that `x` is from now on, as views of it share its memory."""
    with _making:
        if x._parts.dense is None:
            x._parts.dense = _dense(x)
        return x._parts.dense


_making = threading.Lock()  # two threads may take the first view of one tensor


def _watch(x: CBSR) -> None:
    """Notice what is written through a view of `x`: that counts as a change of `x`."""
    if x.is_inference():
        x._parts.stale = True  # nothing counts there
    elif x._parts.version is None:
        x._parts.version = x._version


def _written_tensors(func, given) -> list:
    """The arguments that a call writes into, those in lists too."""
    args, kwargs = given
    schema = touch.schema_of(func).arguments
    named = {a.name: a for a in schema}
    pairs = [
        *zip(schema, args, strict=False),
        *((named[name], value) for name, value in kwargs.items() if name in named),
    ]
    written = [value for a, value in pairs if a.alias_info is not None and a.alias_info.is_write]
    return [t for value in written for t in (value if isinstance(value, (list, tuple)) else [value])]


def _written(func, given):
    """What stands for each CBSR in a call that writes into some of its arguments."""
    if func.overloadpacket in _CHANGE_SHAPE:
        raise RuntimeError(f"{func.overloadpacket}: a CBSR tensor cannot change its shape or memory; use .to_dense()")
    written = set(map(id, _written_tensors(func, given)))

    def substitute(x: CBSR) -> Tensor:
        if id(x) not in written:
            return _dense(x)
        dense = _plain(x)
        x._parts.stale = True
        return dense

    return substitute


def _returned(func, given, out):
    """`out`, with a CBSR in place of the dense tensor that was written into for it."""
    found = {id(x._parts.dense): x for x in _written_tensors(func, given) if isinstance(x, CBSR)}
    return touch.pytree.tree_map_only(Tensor, lambda t: found.get(id(t), t), out)


def _dropout(input, p=0.5, training=True, inplace=False):
    if inplace or not 0 <= p <= 1 or not input.is_compressed:
        return None
    if not training:
        return input
    return input.map_values(lambda values: F.dropout(values, p))


_CHANGE_SHAPE = {
    getattr(aten, name)
    for name in ("t_", "transpose_", "squeeze_", "unsqueeze_", "resize_", "resize_as_", "as_strided_", "set_")
}
# What reads, or writes, a tensor's memory past the dispatcher.
_NEED_MEMORY = {
    Tensor.apply_,
    Tensor.map_,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.data_ptr,
    Tensor.share_memory_,
}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


# Not _operators.Function: torch.compile reads these, and torch 2.11 nothing that it is told to leave unread.
@_timed.timed
class _Compress(torch.autograd.Function):
    """A CBSR of its parts. The gradient that arrives is one to the dense tensor."""

    @staticmethod
    def forward(ctx, values, places, num_feats):
        ctx.save_for_backward(places)
        return CBSR(values.detach(), places, num_feats)

    @staticmethod
    def backward(ctx, grad):
        return collect(grad, ctx.saved_tensors[0]), None, None


@_timed.timed
class _Values(torch.autograd.Function):
    """The entries of a CBSR. Their gradient is one to the CBSR of the same places."""

    @staticmethod
    def forward(ctx, x):
        ctx.num_feats = x.shape[1]
        places = x.places()
        ctx.save_for_backward(places)
        return x._kept_values.detach()

    @staticmethod
    def backward(ctx, grad):
        return compressed(grad, ctx.saved_tensors[0], ctx.num_feats)


@_timed.timed
class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dense = _dense(x)
        return dense if x._parts.dense is None else dense.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


@_timed.timed
class _Linear(torch.autograd.Function):
    """torch.nn.functional.linear of a CBSR tensor, whose gradient is one to its entries: a dense one would have to be
    added in full to those of sums, for the entries alone to be read in the end."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(_dense(x), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = grad_weight = None
        if needs_x:
            grad_x = compressed(collect(grad @ weight, x.places()), x.places(), x.shape[1])
        if needs_weight:
            grad_weight = grad.t() @ x.to_dense()
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None


def _maps_plainly(x: CBSR, weight, bias=None) -> bool:
    """True where `_Linear` stands for linear(): one dtype, no autocast, nothing that traces."""
    given = (weight,) if bias is None else (weight, bias)
    if not x.is_compressed or type(x._parts.values) is not Tensor or weight.dim() != 2:
        return False
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.dtype == x.dtype for t in given)
    return plain and not torch.is_autocast_enabled(x.device.type) and not torch.compiler.is_compiling()


def compressed(values: Tensor, places: Tensor, num_feats: int) -> Any:
    """The CBSR of entries `values` [N, k] at `places` [N, k] of rows of `num_feats`, differentiable. Trusts its
    arguments: places ascend in a row, and are of `places_dtype`."""
    return _Compress.apply(values, places, num_feats)
