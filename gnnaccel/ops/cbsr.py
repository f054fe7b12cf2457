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
import math
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gnnaccel import _library as lib
from gnnaccel import _operators

aten = torch.ops.aten

MAX_FEATURES = 1 << 16


def places_dtype(num_feats: int) -> torch.dtype:
    """Of the indices of rows of `num_feats` features."""
    return torch.uint8 if num_feats <= 256 else torch.uint16


class _Parts:
    """What one CBSR and its aliases stand for: entries, or after a view or a write the dense tensor."""

    def __init__(self, values: Tensor, places: Tensor):
        self.values, self.places = values, places
        self.dense: Tensor | None = None
        self.watched: list[tuple] = []  # (weak reference to a CBSR, its version when a view of it was made)
        self.stale = False  # the dense tensor has been written into

    def compressed(self) -> bool:
        if not self.stale:
            self.stale = any(alias() is None or alias()._version != version for alias, version in self.watched)
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
        self = Tensor._make_wrapper_subclass(
            cls, (values.shape[0], num_feats), dtype=values.dtype, device=values.device
        )
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
        if not self._parts.compressed():
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
        return self._parts.compressed()

    def values(self) -> Tensor:
        """The entries [N, k], differentiable, in the order of `indices`. RuntimeError if it has been written into."""
        return _Values.apply(self)

    def indices(self) -> Tensor:
        """The feature of each entry [N, k], ascending in a row; uint8 for up to 256 features, else uint16."""
        if not self.is_compressed:
            raise RuntimeError("CBSR: it has been written into, and holds no entries any more; use .to_dense()")
        return self._parts.places

    def to_dense(self, dtype: torch.dtype | None = None, **_) -> Tensor:
        """The plain tensor [N, D] that it stands for, differentiable."""
        out = _Dense.apply(self)
        return out if dtype is None else out.to(dtype)

    def map_values(self, function) -> CBSR:
        """The CBSR whose entries are function(values), which keeps their shape and leaves 0 what is 0."""
        out: CBSR = compressed(function(self.values()), self.indices(), self.shape[1])
        return out

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.dropout and isinstance(args[0] if args else kwargs.get("input"), CBSR):
            out = _dropout(*args, **kwargs)
            if out is not None:
                return out
        if func in _NEED_MEMORY and isinstance(args[0], CBSR) and type(args[0]._parts.values) is Tensor:
            args[0]._parts.stale = True
            args = (_plain(args[0]), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.mul.Tensor and not isinstance(args[0], CBSR):
            args = (args[1], args[0])
        rule = _RULES.get(func)
        if rule is not None and isinstance(args[0], CBSR) and args[0].is_compressed:
            out = rule(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        writes = func._schema.is_mutable
        views = not writes and any(a.alias_info is not None for a in func._schema.arguments)
        if not writes and not views:
            args, kwargs = tree_map_only(CBSR, _dense, (args, kwargs))
            return func(*args, **kwargs)
        given = (args, kwargs)
        args, kwargs = tree_map_only(CBSR, _plain if views else _written(func, given), given)
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
    """A saved CBSR: its entries may have been moved to another device, together."""
    out = CBSR(values, places, num_feats)
    out.requires_grad_(requires_grad)
    return out


def _rebuild_dense(dense: Tensor, requires_grad: bool) -> Tensor:
    return dense.requires_grad_(requires_grad)


if hasattr(torch.serialization, "add_safe_globals"):  # not in torch 2.4: torch.load wants weights_only=False there
    torch.serialization.add_safe_globals([CBSR, _rebuild, _rebuild_dense])


def _dense(x: CBSR) -> Tensor:
    """The dense tensor, for reading."""
    parts = x._parts
    return _expand_op(parts.values, parts.places, x.shape[1]) if parts.dense is None else parts.dense


def _plain(x: CBSR) -> Tensor:
    """The dense tensor that `x` is from now on, as views of it share its memory."""
    if x._parts.dense is None:
        x._parts.dense = _dense(x)
    return x._parts.dense


def _watch(x: CBSR) -> None:
    """Notice what is written through a view of `x`: that counts as a change of `x`."""
    if x.is_inference():
        x._parts.stale = True  # nothing counts there
    elif not any(alias() is x for alias, _ in x._parts.watched):
        x._parts.watched.append((weakref.ref(x), x._version))


def _arguments(func, given):
    """(argument of the schema, value) of a call."""
    args, kwargs = given
    names = {a.name: a for a in func._schema.arguments}
    yield from zip(func._schema.arguments, args, strict=False)
    yield from ((names[name], value) for name, value in kwargs.items() if name in names)


def _written(func, given):
    """What stands for each CBSR in a call that writes into some of its arguments."""
    written = {id(v) for a, v in _arguments(func, given) if a.alias_info is not None and a.alias_info.is_write}

    def substitute(x: CBSR) -> Tensor:
        if id(x) not in written:
            return _dense(x)
        dense = _plain(x)
        x._parts.stale = True
        return dense

    return substitute


def _returned(func, given, out):
    """`out`, with a CBSR in place of the dense tensor that was written into for it."""
    targets = [v for a, v in _arguments(func, given) if a.alias_info is not None and a.alias_info.is_write]
    found = {id(x._parts.dense): x for x in targets if isinstance(x, CBSR)}
    return tree_map_only(Tensor, lambda t: found.get(id(t), t), out)


def _alias(func, x):
    return CBSR(x._parts.values, x._parts.places, x.shape[1], x._parts)


def _same_shape(func, x, size, **_):
    return _alias(func, x) if tuple(size) in (tuple(x.shape), (-1, x.shape[1]), (x.shape[0], -1)) else NotImplemented


def _copied(func, x, **kwargs):
    kwargs.pop("memory_format", None)
    values, places = x._parts.values, x._parts.places
    dtype, device = kwargs.get("dtype") or x.dtype, kwargs.get("device") or x.device
    if not dtype.is_floating_point or kwargs.get("layout") not in (None, torch.strided):
        return NotImplemented
    values = aten._to_copy(values, dtype=dtype, device=device, non_blocking=kwargs.get("non_blocking", False))
    return CBSR(values, aten._to_copy(places, device=device), x.shape[1])


def _cloned(func, x, memory_format=None):
    return CBSR(x._parts.values.clone(), x._parts.places, x.shape[1])


def _of_values(func, x, *args):
    return CBSR(func(x._parts.values, *args), x._parts.places, x.shape[1])


def _scaled(func, x, factor):
    """Times or over a finite number, or times a factor per row."""
    if isinstance(factor, Tensor):
        per_row = factor.dim() == 0 or (factor.shape[-1] == 1 and factor.numel() in (1, x.shape[0]))
        if func is not aten.mul.Tensor or isinstance(factor, CBSR) or not per_row or factor.dim() > 2:
            return NotImplemented
    elif not isinstance(factor, (int, float)) or not math.isfinite(factor) or (factor == 0 and func is aten.div.Tensor):
        return NotImplemented
    values = func(x._parts.values, factor)
    return CBSR(values, x._parts.places, x.shape[1]) if values.shape == x._parts.values.shape else NotImplemented


def _added(func, x, other, alpha=1):
    """Gradients of several sums over one CBSR meet."""
    if not same_places(x, other) or not isinstance(alpha, (int, float)):
        return NotImplemented
    return CBSR(x._parts.values.add(other._parts.values, alpha=alpha), x._parts.places, x.shape[1])


def _made_alike(func, x, *args, **kwargs):
    """A tensor that takes shape, dtype and device from `x`: from one that takes no memory."""
    return func(x._parts.values.new_empty(()).expand(x.shape), *args, **kwargs)


def same_places(x, other) -> bool:
    """True if both are CBSR known to keep the same places."""
    both = isinstance(x, CBSR) and isinstance(other, CBSR) and x.is_compressed and other.is_compressed
    return both and x.shape == other.shape and x._parts.places is other._parts.places


def _dropout(input, p=0.5, training=True, inplace=False):
    if inplace or not 0 <= p <= 1 or not input.is_compressed:
        return None
    if not training:
        return input
    return input.map_values(lambda values: F.dropout(values, p))


_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
_RULES = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.view.default: _same_shape,
    aten.expand.default: _same_shape,
    aten.clone.default: _cloned,
    aten._to_copy.default: _copied,
    aten.neg.default: _of_values,
    aten.relu.default: _of_values,
    aten.mul.Tensor: _scaled,
    aten.mul.Scalar: _scaled,
    aten.div.Tensor: _scaled,
    aten.div.Scalar: _scaled,
    aten.add.Tensor: _added,
    **{getattr(aten, name).default: _made_alike for name in (*_LIKE, *_NEW)},
}
# What torch reads a tensor's memory for.
_NEED_MEMORY = {
    Tensor.numpy,
    Tensor.tolist,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.data_ptr,
    Tensor.share_memory_,
}


def description(values: Tensor, places: Tensor, num_feats: int) -> tuple:
    """The binary's description of compressed rows (types.h: Compressed)."""
    return (lib.pointer(values), lib.pointer(places), values.shape[1], num_feats)


def _expand_impl(values, places, num_feats):
    out = values.new_empty(values.shape[0], num_feats)
    if out.numel():
        values, places = values.contiguous(), places.contiguous()
        kept = description(values, places, num_feats)
        lib.launch("expand", out.device, kept, out.shape[0], out.data_ptr(), lib.DTYPES[out.dtype])
    return out


def _expand_fake(values, places, num_feats):
    return values.new_empty(values.shape[0], num_feats)


def _collect_impl(x, places):
    x, places = x.contiguous(), places.contiguous()
    values = x.new_empty(places.shape)
    if values.numel():
        kept = description(values, places, x.shape[1])
        lib.launch("collect", x.device, x.data_ptr(), x.shape[0], kept, lib.DTYPES[x.dtype])
    return values


def _collect_fake(x, places):
    return x.new_empty(places.shape)


def _expand_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def _expand_backward(ctx, grad):
    return _collect_op(grad, ctx.saved_tensors[0]), None, None


def _collect_context(ctx, inputs, output):
    ctx.num_feats = inputs[0].shape[1]
    ctx.save_for_backward(inputs[1])


def _collect_backward(ctx, grad):
    return _expand_op(grad, ctx.saved_tensors[0], ctx.num_feats), None


# [N, k] entries at places of rows of num_feats, others 0.
_expand_op = _operators.register(
    "expand",
    "(Tensor values, Tensor places, SymInt num_feats) -> Tensor",
    _expand_impl,
    _expand_fake,
    backward=_expand_backward,
    setup_context=_expand_context,
)
# values[r, j] = x[r, places[r, j]].
_collect_op = _operators.register(
    "collect",
    "(Tensor x, Tensor places) -> Tensor",
    _collect_impl,
    _collect_fake,
    backward=_collect_backward,
    setup_context=_collect_context,
)
expand, collect = _expand_op, _collect_op


def _collected(func, x, places):
    return x._parts.values if places is x._parts.places else NotImplemented


_RULES[torch.ops.gnnaccel.collect.default] = _collected


class _Compress(torch.autograd.Function):
    """A CBSR of its parts. The gradient that arrives is one to the dense tensor."""

    @staticmethod
    def forward(ctx, values, places, num_feats):
        ctx.save_for_backward(places)
        return CBSR(values.detach(), places, num_feats)

    @staticmethod
    def backward(ctx, grad):
        return _collect_op(grad, ctx.saved_tensors[0]), None, None


class _Values(torch.autograd.Function):
    """The entries of a CBSR. Their gradient is one to the CBSR of the same places."""

    @staticmethod
    def forward(ctx, x):
        ctx.num_feats = x.shape[1]
        places = x.indices()
        ctx.save_for_backward(places)
        return x._kept_values.detach()

    @staticmethod
    def backward(ctx, grad):
        return compressed(grad, ctx.saved_tensors[0], ctx.num_feats)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dense = _dense(x)
        return dense if x._parts.dense is None else dense.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def compressed(values: Tensor, places: Tensor, num_feats: int) -> Any:
    """The CBSR of entries `values` [N, k] at `places` [N, k] of rows of `num_feats`, differentiable. Trusts its
    arguments: places ascend in a row, and are of `places_dtype`."""
    return _Compress.apply(values, places, num_feats)
