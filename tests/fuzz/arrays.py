"""Fuzz target: hostile arrays for the constructors of Graph.

`one_input(data)` turns bytes into arrays and a constructor. Whatever they are, the constructor must raise ValueError
or TypeError, or give a graph whose SpMM, forward and backward, equals the dense product. Never anything else, a crash
least of all.

Under atheris, where installed: ``atheris.Setup(sys.argv, one_input); atheris.Fuzz()``.
"""

from __future__ import annotations

import random

import numpy as np
import scipy.sparse
import torch

import gnnaccel
from gnnaccel import Graph, ops

MAX_NODES = 40  # of a graph that is multiplied with: a dense matrix of it must be cheap

_DTYPES = (
    "int64",
    "int32",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "float32",
    "float64",
    "uint32",
    "complex64",
)
_HUGE = (-1, -(2**31), 2**31 - 1, 2**31, 2**32, 2**62, -(2**63), 2**63 - 1, 1000, 17)


class Bytes:
    """Numbers drawn from bytes; zeros when they run out."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def byte(self) -> int:
        """The next byte."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, limit: int) -> int:
        """A number from 0 to limit - 1."""
        return self.byte() % limit

    def chance(self, one_in: int) -> bool:
        """True once in `one_in` times; never when the bytes run out."""
        return self.byte() % one_in == one_in - 1


def _cast(values: list[int], dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        array = np.array(values, dtype=np.int64).astype(dtype)
    return array


def _array(source: Bytes, values: list[int]):
    """`values` in some dtype, shape, layout and kind of container, mostly as they should be."""
    if source.chance(5) and values:
        values[source.below(len(values))] = _HUGE[source.below(len(_HUGE))]
    array = _cast(values, _DTYPES[source.below(len(_DTYPES))] if source.chance(3) else "int64")
    if source.chance(12) and array.dtype.kind == "f" and array.size:
        array[0] = np.nan
    kind = source.below(14)
    if kind == 0:
        return array.tolist()
    if kind == 1:
        return np.repeat(array, 2)[::2]
    if kind == 2:
        return array.reshape(1, -1)
    if kind == 3:
        return array[:1].reshape(()) if array.size else array
    if kind == 4:
        return (array, None, "edges", 3, {1: 2}, [[1], [2, 3]], object())[source.below(7)]
    if kind == 5:
        return array.astype(array.dtype.newbyteorder())
    if kind == 6:
        return array[::-1]
    if kind == 7:
        array.flags.writeable = False
        return array
    try:
        tensor = torch.tensor(array)
    except TypeError:
        return array
    if kind == 8:
        return torch.stack([tensor, tensor], 1)[:, 0]
    if kind == 9:
        return tensor.to("meta")
    if kind == 10:
        return tensor[:1].expand(tensor.numel()) if tensor.numel() else tensor
    if kind == 11:
        return tensor.to_sparse() if tensor.dtype is not torch.bool else tensor
    return tensor


def _numbers(source: Bytes, count: int, limit: int) -> list[int]:
    return [source.below(max(1, limit)) for _ in range(count)]


def _size(source: Bytes, usual: int):
    """A number of nodes: usually the right one or none."""
    choice = source.below(12)
    if choice < 5:
        return usual
    if choice < 8:
        return None
    return (usual + source.below(9), usual - 1, -1, 0, 2**31, 2**62, 2**63, 1.5, "3", True, np.int64(usual))[
        source.below(11)
    ]


def _coo(source: Bytes):
    rows, cols, nnz = source.below(12), source.below(12), source.below(30)
    nnz = nnz if rows and cols else 0
    i, j = (_array(source, _numbers(source, nnz + source.chance(15), n)) for n in (rows, cols))
    return Graph.from_coo, (i, j), dict(num_rows=_size(source, rows), num_cols=_size(source, cols))


def _csr(source: Bytes):
    rows, cols = source.below(12), 1 + source.below(12)
    counts = _numbers(source, rows, 4)
    indptr = [0, *np.cumsum(counts).tolist()]
    if source.chance(6) and indptr:
        indptr[source.below(len(indptr))] += source.below(5) - 2
    indices = _numbers(source, sum(counts) + source.chance(15), cols)
    order = list(range(len(indices)))
    random.Random(source.byte()).shuffle(order)
    edge_ids = None if source.chance(2) else _array(source, order)
    arrays = _array(source, indptr), _array(source, indices), edge_ids
    return Graph.from_csr, arrays, dict(num_cols=_size(source, cols))


def _scipy(source: Bytes):
    rows, cols, nnz = 1 + source.below(12), 1 + source.below(12), source.below(30)
    i, j = (np.array(_numbers(source, nnz, n), dtype=np.int64) for n in (rows, cols))
    form = ("coo", "csr", "csc", "lil", "dok", "bsr", "dia")[source.below(7)]
    matrix = scipy.sparse.coo_array((np.ones(nnz), (i, j)), shape=(rows, cols)).asformat(form)
    if form in ("csr", "csc", "bsr") and source.chance(2):  # what scipy itself does not check again
        name = ("indices", "indptr")[source.below(2)]
        array = getattr(matrix, name)
        if array.size:
            array[source.below(array.size)] = _HUGE[source.below(len(_HUGE))] % (2**31)
        if source.chance(3):
            matrix.indices = matrix.indices[: source.below(1 + matrix.indices.size)]
        if source.chance(3):
            matrix.indptr = matrix.indptr[: source.below(1 + matrix.indptr.size)]
    if form == "coo" and source.chance(3) and nnz:
        matrix.coords[source.below(2)][0] = _HUGE[source.below(len(_HUGE))] % (2**31)
    function = gnnaccel.as_graph if source.chance(3) else Graph.from_scipy
    return function, (matrix if not source.chance(20) else np.ones((rows, cols)),), {}


def _edge_index(source: Bytes):
    """as_graph of a PyG edge_index, where PyG is installed."""
    nodes, count = 1 + source.below(12), source.below(30)
    index = torch.tensor([_numbers(source, count, nodes), _numbers(source, count, nodes)], dtype=torch.long)
    if source.chance(4) and count:
        index[source.below(2), source.below(count)] = _HUGE[source.below(len(_HUGE))]
    shapes = (index, index.t(), index[0], index.float(), index.int(), index.bool(), index[:, ::2], index.unsqueeze(0))
    return gnnaccel.as_graph, (shapes[source.below(8) if source.chance(2) else 0],), {}


_TARGETS = (_coo, _csr, _scipy, _edge_index)


def _too_large(arguments, sizes) -> bool:
    """True for an honest request of a graph that this process could not hold."""
    numbers = [s for s in sizes.values() if isinstance(s, int)]
    for value in arguments:
        if isinstance(value, (torch.Tensor, np.ndarray, list)):
            try:
                numbers.append(int(torch.as_tensor(value).max()))
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                continue
    return any(number > 10**6 for number in numbers)


def _check(graph: Graph) -> None:
    """SpMM of the graph and its gradient against the dense matrix of the same arrays."""
    if max(graph.num_rows, graph.num_cols) > MAX_NODES or graph.device.type != "cpu":
        return
    rows = torch.repeat_interleave(torch.arange(graph.num_rows), graph.indptr.diff().long())
    cols = graph.indices.long()
    ids = torch.arange(graph.nnz) if graph.edge_ids is None else graph.edge_ids.long()
    assert torch.equal(ids.sort().values, torch.arange(graph.nnz)), "edge ids are no permutation"
    weight = torch.linspace(-1, 1, graph.nnz, dtype=torch.float64)
    dense = torch.zeros(graph.num_rows, graph.num_cols, dtype=torch.float64)
    dense.index_put_((rows, cols), weight[ids], accumulate=True)
    x = torch.linspace(-2, 3, graph.num_cols * 3, dtype=torch.float64).view(graph.num_cols, 3).requires_grad_()
    out = ops.spmm(graph, x, weight)
    torch.testing.assert_close(out, dense @ x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, dense.sum(0).unsqueeze(1).expand_as(x))


def one_input(data: bytes) -> str:
    """Run one input; returns "graph" or the name of the error that was raised, so that a test can count them."""
    source = Bytes(data)
    try:
        function, arguments, options = _TARGETS[source.below(len(_TARGETS))](source)
    except Exception as error:  # NumPy, SciPy or torch would not even make it
        return f"not made: {type(error).__name__}"
    if _too_large(arguments, options):
        return "too large"
    try:
        graph = function(*arguments, **options)
    except (ValueError, TypeError) as error:
        assert str(error), "an error without a message"
        return type(error).__name__
    _check(graph)
    return "graph"


def case(seed: int) -> None:
    """Random bytes."""
    rng = random.Random(seed)
    one_input(rng.randbytes(rng.randrange(1, 120)))
