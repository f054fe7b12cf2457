"""Sums over a graph whose calls are made ready once.

On a small graph an op is its way to the kernel: checks, argument lists, autograd's objects. A sum of copied sources
that is asked for again, on the same graph with features of the same width and dtype, finds both of its calls here, of
the forward pass and of the backward, as argument lists that lack nothing but the features and the result. They are made
at the first use: that takes less than the general way does. Only a small graph is given a few uses before, as it may be
a sampled one that is gone after the layers of one step (`Once`).
Whatever is unusual (a mode, a view, a second derivative) goes the general way, which gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators, schedule, tiles, touch
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds, choose
from gnnaccel.ops._arrays import Matrix, Structure, arrays_of, csr_of, epilogue_of, scales_first
from gnnaccel.ops._bias import column_sums
from gnnaccel.ops.ready_call import NO_MORE, Kernel, own_pays, with_more, with_own

_TENSORS = (Tensor, torch.nn.Parameter)
_ON_CPU, _COPY, _MUL = torch.device("cpu"), lib.MESSAGES["copy_lhs"], lib.MESSAGES["mul"]


def calls_of(graph: Graph) -> dict:
    """What of `sum_of` is ready for `graph`, by its arguments."""
    calls: dict | None = getattr(graph.slots, "ready", None)
    return graph.slot("ready", dict) if calls is None else calls


def sum_of(
    graph: Graph,
    x: Any,
    form: Form,
    source_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor | None:
    """What op `form` gives for x [num_cols, num_feats], constant scales and a bias [num_feats], by a ready call.

    Returns None where the general way is to be taken, with all its checks: nothing has been done then.
    """
    if type(x) not in _TENSORS or torch.compiler.is_compiling() or touch.watched():
        return None
    if touch.in_forward_mode():
        return None
    recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    both = recorded and x.requires_grad
    ready = call_of(graph, x, form, source_scale, row_scale, bias, both)
    if ready is None:
        return None
    if both or (recorded and bias is not None and bias.requires_grad):
        return _record(x, bias, ready)
    return ready.forward(x, bias)


def call_of(
    graph: Graph,
    x: Tensor,
    form: Form,
    source_scale: Tensor | None,
    row_scale: Tensor | None,
    bias: Tensor | None,
    both: bool,
) -> Ready | Once | None:
    """What `sum_of` calls, where it is known that nobody listens: forward(x, bias), and gradient(grad) if a call of
    `both` directions is wanted. None as of `sum_of`."""
    if x.dim() != 2 or x.shape[0] != graph.num_cols:
        return None
    if bias is not None and (type(bias) not in _TENSORS or bias.shape != x.shape[1:] or bias.dtype != x.dtype):
        return None
    # With what torch makes of x, or an evaluation in inference mode would leave nothing ready for training. Without the
    # scales: a caller who makes new ones for each call leaves no more than one pair behind.
    key = (form.name, x.shape[1], x.dtype, bias is None, touch.keys(x))
    calls = calls_of(graph)
    ready: Ready | Once | None = calls.get(key)
    if type(ready) is not Ready or not ready.is_of(source_scale, row_scale) or ready.stale(graph):
        if not _may_be_made(graph, x, source_scale, row_scale):
            return None
        if len(calls) >= bounds.READY_SUMS:
            calls.clear()
        if type(ready) is not Ready and _is_new(graph):
            if bias is not None and (touch.keys(bias) != touch.keys(x) or not bias.is_contiguous()):
                return None
            once = ready if type(ready) is Once and ready.is_of(source_scale, row_scale) else None
            if once is None:
                once = calls[key] = Once(graph, x, form, (source_scale, row_scale))
            choose.age_of(graph).use()
            return once
        once = calls.pop(key, None)
        ready = Ready(graph, x, form, source_scale, row_scale, bias, both)
        if tiles.are_profitable(graph):  # which the graph has found out just now, with its lists
            return None
        calls[key] = ready
        if both and type(once) is Once and once.is_of(source_scale, row_scale):
            once.later = ready
    if not ready.forward.may_read(x) or not (bias is None or ready.forward.takes(bias)):
        return None
    if both and ready.backward is None and not ready.add_backward(graph, x):
        return None
    return ready


def _is_new(graph: Graph) -> bool:
    """True for a small graph that nobody has transposed, ordered or listed: it may be gone after this call."""
    if graph._transposed is not None or graph._origin_arrays is not None:
        return False
    if graph.indptr.is_cuda:
        return graph.indices.shape[0] <= bounds.SMALL_GRAPH["cuda"] and schedule.is_new(graph)
    small = graph.indices.shape[0] <= bounds.SMALL_GRAPH["cpu"]
    return small and schedule.ordered(graph) is None and choose.is_new(choose.age_of(graph))


def _may_be_made(graph: Graph, x: Tensor, source_scale: Tensor | None, row_scale: Tensor | None) -> bool:
    """True where the arguments, of which `sum_of` has looked at some, settle what is called."""
    dtype, device = x.dtype, x.device
    if not _operators.dense(x) or dtype not in lib.DTYPES or device != graph.indptr.device:
        return False
    if not x.is_contiguous() or not x.numel() or not graph.num_rows or tiles.are_profitable(graph):
        return False
    if not x.is_cuda:
        if dtype is torch.float16:
            return False
    elif x.data_ptr() % 16 or graph.transient():
        return False
    if source_scale is row_scale is None:
        return True
    wide = dtype if dtype is torch.float64 else torch.float32
    for scale, count in ((source_scale, graph.num_cols), (row_scale, graph.num_rows)):
        if scale is None:
            continue
        if type(scale) is not Tensor or not scale.is_contiguous() or scale.requires_grad:
            return False
        if scale.shape != (count,) or scale.dtype != wide or scale.device != device:
            return False
    return True


class Form:
    """A sum that can be made ready.

    Parameters
    ----------
    name : str
        "sum" or "mean" of copied sources, "scaled": the sum with a scale for each source and one for each row, or
        "weighted": that with a weight for each edge (ready_weighted.py).
    gradient : callable
        gradient(arrays, grad, source_scale, row_scale): the gradient of x by the registered ops, differentiable. Of
        "weighted" gradient(arrays, x, weight, grad, needed): those of x and of the weight, as far as needed.
    """

    __slots__ = ("gradient", "message", "name", "reduce")

    def __init__(self, name: str, gradient: Callable[..., Any]):
        self.name, self.gradient = name, gradient
        self.reduce = lib.REDUCES["mean" if name == "mean" else "sum"]
        self.message = _MUL if name == "weighted" else _COPY


class Ready:
    """Both directions of a sum on one graph.

    forward, backward : Kernel; no backward before it is needed.
    scales : constants whose addresses the calls hold.

    Holds no Graph, which keeps it. `both`: whether a backward will be needed.
    """

    __slots__ = ("_asked", "_asked_back", "_both", "_epochs", "_form", "arrays", "backward", "forward", "scales")

    def __init__(
        self,
        graph: Graph,
        x: Tensor,
        form: Form,
        source_scale: Tensor | None,
        row_scale: Tensor | None,
        bias: Tensor | None,
        both: bool,
    ):
        arrays = arrays_of(graph, both, x, sums=True)
        self._form, self.arrays, self._both, self.scales = form, arrays, both, (source_scale, row_scale)
        epilogue = (
            epilogue_of(source_scale=source_scale, row_scale=row_scale, bias=bias) if form.name == "scaled" else ()
        )
        self.forward = Kernel(arrays, x, form.message, form.reduce, epilogue)
        self.backward: Kernel | None = None
        # Uses of the graph, and of the transposed one, at which there was no list; None: one is there, or not wanted.
        self._asked = choose.age_of(graph).uses if x.is_cuda and arrays.order is None else None
        self._asked_back: int | None = None
        self._epochs = schedule.epochs(graph)

    def is_of(self, source_scale: Tensor | None, row_scale: Tensor | None) -> bool:
        """True if these are the scales of the calls."""
        mine = self.scales
        return mine[0] is source_scale and mine[1] is row_scale

    def stale(self, graph: Graph) -> bool:
        """True once `graph` may have other lists than it had, or has earned some."""
        if self._asked is not None and schedule.note_use(graph, self._asked):
            return True
        if self._asked_back is not None and schedule.note_use(graph.transposed, self._asked_back):
            return True
        return self._epochs != schedule.epochs(graph)

    def add_backward(self, graph: Graph, x: Tensor) -> bool:
        """Make the call of the backward pass ready too."""
        if not self._both:
            self.arrays, self._both = arrays_of(graph, True, x, sums=True), True
            self._epochs = schedule.epochs(graph)
        arrays = self.arrays
        transposed = arrays.transposed()
        # The lists of the graph may have been earned by calls without a gradient: those of the transpose are its own.
        if x.is_cuda and transposed.order is None:
            self._asked_back = choose.age_of(graph.transposed).uses
        source_scale, row_scale = self.scales
        epilogue: tuple = ()
        if self._form.name == "scaled":
            epilogue = epilogue_of(source_scale=row_scale, row_scale=source_scale)
        elif self._form.name == "mean":
            epilogue = epilogue_of(source_indptr=arrays.indptr)
        if epilogue and scales_first(transposed.nnz, transposed.num_cols, x):
            return False  # the gradient is multiplied before the sum
        self.backward = self.forward.along(transposed, lib.REDUCES["sum"], epilogue)
        return True

    def reads(self, weight: Tensor) -> bool:
        """True for weights that lie as the calls take them."""
        return self.forward.reads(weight)

    def with_own(self, x: Tensor, factor: Tensor) -> Tensor:
        """The sum, and of as many rows as columns `factor` [1] times x[r] in row r of it."""
        return with_own(self.forward, x, factor, self.arrays.nnz)

    def structure(self, both: bool) -> Structure:
        """The graph for the ops; with its transposed one if a kernel reads `both`."""
        return self.arrays

    def gradient(self, grad: Tensor, into: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
        """The gradient of x of any kind of gradient, a new tensor. `factor`: that of `with_own`."""
        usual = not torch.is_grad_enabled() and type(grad) is Tensor and not touch.watched()
        if usual and self.backward is not None and self.backward.takes(grad := grad.contiguous()):
            if factor is None:
                return self.backward(grad)
            return with_own(self.backward, grad, factor, self.arrays.nnz)
        found = self._form.gradient(self.arrays, grad, *self.scales)
        return found if factor is None else found + factor * grad


class Once:
    """A sum over a small graph that is new, and may be gone soon: nothing is made for calls to come.

    forward(x, bias, weight), gradient(grad), reads, structure, scales : as of `Ready`.
    later : of a graph that has lasted, its calls of both directions.
    """

    __slots__ = (
        *("_csr", "_device", "_dtype", "_form", "_keys", "_num_cols", "_num_rows", "_tensors"),
        *("later", "scales"),
    )

    def __init__(self, graph: Graph, x: Tensor, form: Form, scales: tuple):
        self._tensors, self._csr = (graph.indptr, graph.indices, graph.edge_ids), csr_of(graph)
        self._num_rows, self._num_cols, self._device = graph.num_rows, graph.num_cols, x.device
        self._form, self.scales, self._keys, self._dtype = form, scales, touch.keys(x), lib.DTYPES[x.dtype]
        self.later: Ready | None = None

    def is_of(self, source_scale: Tensor | None, row_scale: Tensor | None) -> bool:
        """As of `Ready`."""
        return self.scales[0] is source_scale and self.scales[1] is row_scale

    def reads(self, values: Tensor) -> bool:
        """True for weights, or a gradient, that lie as the calls take them."""
        return touch.keys(values) == self._keys and values.is_contiguous() and values.device == self._device

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        weight: Tensor | None = None,
        factor: Tensor | None = None,
        wide: bool = False,
    ) -> Tensor:
        form, feats = self._form, x.shape[1]
        out = x.new_empty(self._num_rows, feats, dtype=torch.float32 if wide else x.dtype)
        epilogue: tuple = ()
        if form.name == "scaled":
            source, row = self.scales
            epilogue = (source.data_ptr(), 0, row.data_ptr(), *NO_MORE)
        if wide or not (bias is factor is None):
            epilogue = with_more(epilogue, x, bias, factor, wide)
        edges = (0 if weight is None else weight.data_ptr(), 1, 1)
        result = (out.data_ptr(), 0, 0, feats, form.message, form.reduce, self._dtype, 0.0, epilogue)
        unlisted = None if x.is_cuda else 0
        lib.launch("spmm", self._device, self._csr, unlisted, (x.data_ptr(), feats, 1), edges, *result)
        return out

    def with_own(self, x: Tensor, factor: Tensor) -> Tensor:
        """As of `Ready`."""
        return with_own(self.forward, x, factor, self._tensors[1].shape[0])

    def gradient(self, grad: Tensor, into: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
        """That of x of any kind of gradient. `into`: where it may be put, contiguous, of its shape and dtype; `factor`:
        that of `with_own`."""
        if self.later is not None and into is None:
            return self.later.gradient(grad, factor=factor)
        if not torch.is_grad_enabled() and type(grad) is Tensor and not touch.watched():
            grad = grad.contiguous()
            inside = factor if factor is not None and own_pays(grad, factor, self._tensors[1].shape[0]) else None
            found = self.transposed(grad, into=into, factor=inside)
            if found is not None:
                return found if factor is None or inside is factor else found.addcmul_(grad, factor)
        found = self._form.gradient(self.structure(True), grad, *self.scales)
        return found if factor is None else found + factor * grad

    def transposed(
        self, grad: Tensor, weight: Tensor | None = None, into: Tensor | None = None, factor: Tensor | None = None
    ) -> Tensor | None:
        """The gradient of x, plus factor * grad; None where a kernel does not take these. The matrix is transposed in
        the same call, which takes less than to make a Graph of it."""
        if not self.reads(grad) or not (weight is None or self.reads(weight)) or grad.data_ptr() % 16:
            return None
        form, feats = self._form, grad.shape[1]
        epilogue: tuple = ()
        if form.name == "scaled":
            source, row = self.scales
            epilogue = (row.data_ptr(), 0, source.data_ptr(), *NO_MORE)
        elif form.name == "mean":
            epilogue = (0, self._tensors[0].data_ptr(), 0, *NO_MORE)
        if epilogue and scales_first(self._tensors[1].shape[0], self._num_rows, grad):
            return None
        if factor is not None:
            epilogue = with_more(epilogue, grad, None, factor, False)
        out = grad.new_empty(self._num_cols, feats) if into is None else into
        edges = 0 if weight is None else weight.data_ptr()
        given = (grad.data_ptr(), edges, out.data_ptr(), feats, self._dtype, epilogue)
        lib.launch("spmm_transposed", self._device, self._csr, *given)
        return out

    def structure(self, both: bool) -> Structure:
        """The graph for the ops; with its transposed one, made now, if a kernel reads `both`."""
        indptr, indices, edge_ids = self._tensors
        made = Structure(Matrix(indptr, indices, edge_ids, self._num_cols, indices.shape[0]))
        return made.both_ways() if both else made


class _Sum(_operators.Function):
    @staticmethod
    def forward(ctx, x, bias, ready):
        ctx.ready = ready
        if ready.scales[1] is not None:
            ctx.save_for_backward(*ready.scales)
        return ready.forward(x, bias)

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors  # raises if a scale was written into
        of_x, of_bias, _ = ctx.needs_input_grad
        grad_bias = column_sums(grad.contiguous()) if of_bias else None
        return ctx.ready.gradient(grad) if of_x else None, grad_bias, None


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_record = super(torch.autograd.Function, _Sum).apply  # type: ignore[misc]
