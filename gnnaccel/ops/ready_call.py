"""One call of a sum, as an argument list that lacks nothing but features and result, and what it may do beside."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import touch
from gnnaccel.lower import bounds
from gnnaccel.ops._arrays import Structure, sources_matter

_COPY = lib.MESSAGES["copy_lhs"]
_NO_SCALES, NO_MORE = (0, 0, 0), (0, 0, 0, False, False)  # parts of what `epilogue_of` gives


class Kernel:
    """One call of the sum out[r] = sum over nonzeros (r, c) of x[c], with its `epilogue`, but for x and out; or of x[c]
    times a weight of the edge.

    Parameters
    ----------
    arrays : Structure
        Kept, as the arguments are addresses.
    x : Tensor [any, num_feats]
        Contiguous, of the width, dtype and device that the call is for.
    message, reduce : int
        Codes of a copy or a product, and of a sum or a mean.
    epilogue : tuple
        Of `epilogue_of`; the bias in it is replaced by that of each call.
    """

    __slots__ = ("_arrays", "_before", "_entry", "_epilogue", "_in_order", "_index", "_keys", "_result", "_rows")

    def __init__(self, arrays: Structure, x: Tensor, message: int, reduce: int, epilogue: tuple):
        device = x.device
        self._arrays, self._rows, self._keys = arrays, arrays.num_rows, touch.keys(x)
        self._in_order = message == _COPY or sources_matter(x.shape[1], 1)
        self._before = arrays.walked(self._in_order)
        self._result = (0, 0, x.shape[1], message, reduce, lib.DTYPES[x.dtype], 0.0)
        self._epilogue, self._entry = epilogue, lib.entry("spmm", device)
        self._index = device.index if x.is_cuda else None

    def along(self, arrays: Structure, reduce: int, epilogue: tuple) -> Kernel:
        """The call for the same kind of features over other `arrays`."""
        other = object.__new__(type(self))
        other._arrays, other._rows, other._keys = arrays, arrays.num_rows, self._keys
        other._in_order = self._in_order
        other._before = arrays.walked(self._in_order)
        result = self._result
        other._result = (*result[:4], reduce, *result[5:])
        other._epilogue, other._index, other._entry = epilogue, self._index, self._entry
        return other

    def takes(self, x: Tensor) -> bool:
        """True for a contiguous tensor that torch treats as the one the call was made for; a bias as well as x."""
        if touch.keys(x) != self._keys:
            return False
        return x.is_contiguous() if self._index is None else self.may_read(x)

    def reads(self, weight: Tensor) -> bool:
        """True for weights that lie as the call takes them."""
        if touch.keys(weight) != self._keys or not weight.is_contiguous():
            return False
        return self._index is None or weight.device.index == self._index

    def may_read(self, x: Tensor) -> bool:
        """The same of a tensor that torch treats so."""
        if not x.is_contiguous():
            return False
        if self._index is None:
            return True
        return x.device.index == self._index == torch.cuda.current_device() and x.data_ptr() % 16 == 0

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        weight: Tensor | None = None,
        factor: Tensor | None = None,
        wide: bool = False,
    ) -> Tensor:
        """The sums [num_rows, num_feats] of an x that it takes; with weights [nnz], if it was made for them.

        bias : Tensor [num_feats]
        factor : Tensor of one number, of the dtype of accumulators
            Row r has so many times x[r] besides.
        wide : bool
            On CUDA, of a 16-bit x of whole vectors: the bias and the sums are of float32.
        """
        feats = x.shape[1]
        out = x.new_empty(self._rows, feats, dtype=torch.float32 if wide else x.dtype)
        epilogue = self._epilogue
        if wide or not (bias is factor is None):
            epilogue = with_more(epilogue, x, bias, factor, wide)
        on = torch.get_num_threads() if self._index is None else touch.raw_stream(self._index)
        before, given = self._before, (x.data_ptr(), feats, 1)
        edges = (0 if weight is None else weight.data_ptr(), 1, 1)
        self._entry(*before, given, edges, out.data_ptr(), *self._result, epilogue, on)
        return out


def with_more(epilogue: tuple, x: Tensor, bias: Tensor | None, factor: Tensor | None, wide: bool) -> tuple:
    """With this bias, and the sources themselves times a factor."""
    own = (0, 0) if factor is None else (x.data_ptr(), factor.data_ptr())
    scales = epilogue[:3] if epilogue else _NO_SCALES
    return (*scales, 0 if bias is None else bias.data_ptr(), *own, False, wide)


def with_own(sums: Callable, x: Tensor, factor: Tensor, nnz: int) -> Tensor:
    """sums(x, None) + factor * x."""
    if own_pays(x, factor, nnz):
        return sums(x, None, factor=factor)
    return sums(x, None).addcmul_(x, factor)  # which autocast leaves alone


def own_pays(x: Tensor, factor: Tensor, nnz: int) -> bool:
    """True where a kernel is to add factor * x, and takes it. On the CPU sums of 16 bits are rounded before, as by PyG
    alone: the same bits."""
    if factor.dtype is not lib.accumulator(x):
        return False
    return nnz <= bounds.OWN_DEGREE * x.shape[0] if x.is_cuda else x.element_size() > 2


def takes_wide(x: Tensor, bias: Tensor | None) -> bool:
    """True where the sums of x may be of float32, with such a bias."""
    if not x.is_cuda or x.element_size() != 2 or x.shape[1] % (16 // x.element_size()):
        return False
    return bias is None or (bias.dtype is torch.float32 and bias.is_contiguous())
