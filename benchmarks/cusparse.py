"""cuSPARSE called directly: SpMM and SDDMM in fp32 on a CSR matrix with int32 indices.

Through ctypes on the library that torch has loaded, so that both run the same version. Preprocessed when an object
is made, as a user who calls it often would; calling the object queues the product alone on torch's current stream:

    spmm = SpMM(indptr, indices, weight, x, CSR_ALG3)
    out = spmm()                                        # the same tensor on every call

Argument order and constants follow cusparse.h of CUDA 13.0 (12.6.3).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from ctypes import byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p

import torch
from torch import Tensor

CSR_ALG2, CSR_ALG3 = 6, 12  # cusparseSpMMAlg_t
_SDDMM_ALG_DEFAULT = 0  # cusparseSDDMMAlg_t
_NON_TRANSPOSE, _TRANSPOSE = 0, 1  # cusparseOperation_t
_INDEX_32I, _BASE_ZERO = 2, 0  # cusparseIndexType_t, cusparseIndexBase_t
_ORDER_ROW = 2  # cusparseOrder_t
_POINTER_MODE_HOST = 0  # cusparsePointerMode_t
_R_32F = 0  # cudaDataType

# handle, opA, opB, alpha, matA, matB, beta, matC, computeType, alg; then the buffer, or where to put its size.
_PRODUCT = [c_void_p, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_void_p]
PROTOTYPES: dict[str, list] = {
    "cusparseCreate": [c_void_p],
    "cusparseGetVersion": [c_void_p, c_void_p],
    "cusparseSetStream": [c_void_p, c_void_p],
    "cusparseSetPointerMode": [c_void_p, c_int],
    "cusparseCreateCsr": [c_void_p, *[c_int64] * 3, *[c_void_p] * 3, *[c_int] * 4],
    "cusparseCreateDnMat": [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int, c_int],
    "cusparseDestroySpMat": [c_void_p],
    "cusparseDestroyDnMat": [c_void_p],
    "cusparseSpMM_bufferSize": _PRODUCT,
    "cusparseSpMM_preprocess": _PRODUCT,
    "cusparseSpMM": _PRODUCT,
    "cusparseSDDMM_bufferSize": _PRODUCT,
    "cusparseSDDMM_preprocess": _PRODUCT,
    "cusparseSDDMM": _PRODUCT,
}


@functools.cache
def _library() -> ctypes.CDLL:
    """The cuSPARSE in this process (torch's), with its prototypes declared."""
    path = "libcusparse.so.12"
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        path = next((line.split(maxsplit=5)[5].strip() for line in maps if "/libcusparse.so" in line), path)
    try:
        library = ctypes.CDLL(path)
        for name, argtypes in PROTOTYPES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = argtypes, c_int
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"cuSPARSE cannot be called directly: {error}") from error
    library.cusparseGetErrorString.argtypes, library.cusparseGetErrorString.restype = [c_int], c_char_p
    return library


def _call(name: str, *arguments) -> None:
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} failed with status {status}: {_library().cusparseGetErrorString(status).decode()}")


@functools.cache
def _handle() -> c_void_p:
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # cuSPARSE then finds torch's context
    handle = c_void_p()
    _call("cusparseCreate", byref(handle))
    _call("cusparseSetPointerMode", handle, _POINTER_MODE_HOST)
    return handle


def version() -> str:
    """As in cusparse.h: 12.6.3."""
    number = c_int()
    _call("cusparseGetVersion", _handle(), byref(number))
    return f"{number.value // 1000}.{number.value // 100 % 10}.{number.value % 100}"


def _use_stream_of(tensor: Tensor) -> None:
    stream = torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None
    _call("cusparseSetStream", _handle(), stream)


def _checked(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> c_void_p:
    """Pointer to `tensor`, which is all that cuSPARSE will know of it."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        got = f"{tensor.dtype} {tuple(tensor.shape)}{'' if tensor.is_contiguous() else ', strided'}"
        raise ValueError(f"{name}: expected a contiguous tensor, {dtype} {shape}, got {got}")
    return c_void_p(tensor.data_ptr())


def _csr(indptr: Tensor, indices: Tensor, values: Tensor, num_cols: int) -> c_void_p:
    num_rows, nnz = indptr.numel() - 1, indices.numel()
    arrays = (
        _checked("indptr", indptr, torch.int32, num_rows + 1),
        _checked("indices", indices, torch.int32, nnz),
        _checked("values", values, torch.float32, nnz),
    )
    matrix = c_void_p()
    codes = (_INDEX_32I, _INDEX_32I, _BASE_ZERO, _R_32F)
    _call("cusparseCreateCsr", byref(matrix), num_rows, num_cols, nnz, *arrays, *codes)
    return matrix


def _dense(name: str, values: Tensor, num_rows: int) -> c_void_p:
    """Row-major, so that a row is one node's features."""
    width = values.shape[-1]
    pointer, matrix = _checked(name, values, torch.float32, num_rows, width), c_void_p()
    _call("cusparseCreateDnMat", byref(matrix), num_rows, width, width, pointer, _R_32F, _ORDER_ROW)
    return matrix


def _destroy(sparse: list[c_void_p], dense: list[c_void_p]) -> None:
    for matrix in sparse:
        _call("cusparseDestroySpMat", matrix)
    for matrix in dense:
        _call("cusparseDestroyDnMat", matrix)


class _Product:
    """out = op_a(a) op_b(b) with alpha 1 and beta 0, preprocessed; keeps everything alive that cuSPARSE points to."""

    def __init__(self, name, op_b, a, b, c, algorithm, out, kept):
        self._name, self.out, self._kept = name, out, kept
        self._one, self._zero = c_float(1.0), c_float(0.0)
        operands = (byref(self._one), a, b, byref(self._zero), c)
        self._arguments = (_handle(), _NON_TRANSPOSE, op_b, *operands, _R_32F, algorithm)
        _use_stream_of(out)
        size = c_size_t()
        _call(f"{name}_bufferSize", *self._arguments, byref(size))
        self._buffer = torch.empty(max(size.value, 16), dtype=torch.uint8, device=out.device)
        _call(f"{name}_preprocess", *self._arguments, c_void_p(self._buffer.data_ptr()))

    def __call__(self) -> Tensor:
        _use_stream_of(self.out)
        _call(self._name, *self._arguments, c_void_p(self._buffer.data_ptr()))
        return self.out


class SpMM(_Product):
    """out [num_rows, D] = A x, with A the CSR matrix of `values` [nnz] and x [num_cols, D]."""

    def __init__(self, indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, algorithm: int):
        num_rows, (num_cols, width) = indptr.numel() - 1, x.shape
        out = x.new_zeros(num_rows, width)
        matrix = _csr(indptr, indices, values, num_cols)
        dense = [_dense("x", x, num_cols), _dense("out", out, num_rows)]
        weakref.finalize(self, _destroy, [matrix], dense)
        kept = (indptr, indices, values, x)
        super().__init__("cusparseSpMM", _NON_TRANSPOSE, matrix, *dense, algorithm, out, kept)


class SDDMM(_Product):
    """out [nnz] = dot(v[row], x[column]) of each nonzero, with v [num_rows, D] and x [num_cols, D]."""

    def __init__(self, indptr: Tensor, indices: Tensor, x: Tensor, v: Tensor):
        num_rows, num_cols = indptr.numel() - 1, x.shape[0]
        out = x.new_zeros(indices.numel())
        matrix = _csr(indptr, indices, out, num_cols)
        # x as it lies, transposed by the operation: column-major and not transposed would be the same bytes.
        dense = [_dense("v", v, num_rows), _dense("x", x, num_cols)]
        weakref.finalize(self, _destroy, [matrix], dense)
        kept = (indptr, indices, x, v)
        super().__init__("cusparseSDDMM", _TRANSPOSE, *dense, matrix, _SDDMM_ALG_DEFAULT, out, kept)
