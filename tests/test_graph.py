"""Graph constructors, and every bad argument of graphs and ops: the exception's type, and words it must contain."""

import copy
import gc
import os
import pickle
import signal
import threading
import weakref

import graphs
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from oracle import rand
from torch._subclasses.fake_tensor import FakeTensorMode

import gnnaccel
from gnnaccel import _library, ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference
from gnnaccel.planning.advice import advise

INT_MAX = 2**31 - 1


def edges(graph):
    """The (row, column) pairs in edge-id order."""
    pairs = torch.empty(graph.nnz, 2, dtype=torch.int64)
    pairs[reference.edges_of(graph)] = torch.stack([reference.rows_of(graph.indptr), graph.indices.long()], 1)
    return pairs.tolist()


@pytest.mark.parametrize("make", [list, np.array, torch.tensor], ids=["list", "numpy", "tensor"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_from_coo(make, index):
    rows, cols = [3, 0, 3, 0, 3], [1, 1, 0, 1, 1]
    if make is torch.tensor:
        graph = Graph.from_coo(torch.tensor(rows, dtype=index), torch.tensor(cols, dtype=index))
    else:
        graph = Graph.from_coo(make(rows), make(cols))
    assert (graph.num_rows, graph.num_cols, graph.nnz) == (4, 4, 5)
    assert graph.indptr.tolist() == [0, 2, 2, 2, 5]
    assert graph.indices.tolist() == [1, 1, 1, 0, 1]  # stable: input order within a row
    assert graph.edge_ids.tolist() == [1, 3, 0, 2, 4]
    assert {graph.indptr.dtype, graph.indices.dtype, graph.edge_ids.dtype} == {torch.int32}
    assert edges(graph) == [list(pair) for pair in zip(rows, cols, strict=True)]
    assert "num_rows=4" in repr(graph)
    assert graph.device == torch.device("cpu")


def test_from_coo_sizes():
    assert repr(Graph.from_coo([], [])) == "Graph(num_rows=0, num_cols=0, nnz=0, device=cpu)"
    graph = Graph.from_coo([0], [4], num_rows=2, num_cols=np.int64(9))
    assert (graph.num_rows, graph.num_cols) == (2, 9)
    assert Graph.from_coo(torch.tensor([0]), torch.tensor([1], dtype=torch.int32)).nnz == 1


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("nnz", [0, 1, 40, 700_000])
def test_pairs_in_order_keep_their_places(nnz, index):
    """No sort, and no edge ids: also where one thread's share ends and the next begins a descent is seen."""
    rows, cols = torch.randint(300, (nnz,), dtype=index).sort().values, torch.randint(500, (nnz,), dtype=index)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        graph = Graph.from_coo(rows, cols, num_rows=300, num_cols=500)
        assert graph.edge_ids is None
        assert torch.equal(graph.indices, cols.int())
        assert torch.equal(graph.indptr.long().diff(), torch.bincount(rows, minlength=300))
        order = torch.sort(cols, stable=True).indices
        assert torch.equal(graph.transposed.edge_ids.long(), order)
        assert torch.equal(graph.transposed.indices, rows[order].int())
    for place in (1, nnz // 3, nnz // 2, nnz - 1) if nnz > 1 else ():
        swapped = rows.clone()
        swapped[place - 1], swapped[place] = 299, 0
        graph = Graph.from_coo(swapped, cols, num_rows=300, num_cols=500)
        assert torch.equal(graph.edge_ids.long(), torch.sort(swapped, stable=True).indices)


@pytest.mark.parametrize("nnz", [70_000, 700_000])
def test_large_conversions_are_stable(nnz):
    """Enough edges for several threads, each with its own share of the counters."""
    rows, cols = torch.randint(0, 300, (nnz,)), torch.randint(0, 5000, (nnz,))
    order = torch.sort(rows, stable=True).indices
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        graph = Graph.from_coo(rows, cols, num_rows=300, num_cols=5000)
        assert torch.equal(graph.edge_ids.long(), order)
        assert torch.equal(graph.indices.long(), cols[order])
        assert torch.equal(graph.indptr.long().diff(), torch.bincount(rows, minlength=300))
        turned = graph.transposed
        by_col = torch.sort(graph.indices, stable=True).indices
        assert torch.equal(turned.edge_ids, graph.edge_ids[by_col])
        assert torch.equal(turned.indices.long(), rows[order][by_col])
        assert torch.equal(turned.indptr.long().diff(), torch.bincount(cols, minlength=5000))


def test_from_csr():
    graph = Graph.from_csr([0, 2, 2, 3], [5, 0, 1], [2, 0, 1])
    assert (graph.num_rows, graph.num_cols, graph.nnz) == (3, 6, 3)
    assert edges(graph) == [[0, 0], [2, 1], [0, 5]]
    mixed = Graph.from_csr(torch.tensor([0, 1]), torch.tensor([0], dtype=torch.int32))
    assert mixed.indices.dtype == mixed.indptr.dtype == torch.int64
    assert mixed.edge_ids is None
    assert Graph.from_csr([0], []).num_rows == 0
    assert Graph.from_csr([0, 1, 2], [0, 0], num_cols=1).num_cols == 1
    strided = Graph.from_csr(torch.tensor([0, 9, 2, 9])[::2], torch.tensor([1, 9, 0, 9])[::2])
    assert strided.indices.tolist() == [1, 0]
    assert strided.indices.is_contiguous()


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "lil", "dok", "bsr"])
@pytest.mark.parametrize("kind", [sp.coo_matrix, sp.coo_array])
def test_from_scipy(form, kind):
    rows, cols = [2, 0, 2, 1], [1, 3, 0, 1]
    matrix = kind((np.arange(1.0, 5.0), (rows, cols)), shape=(3, 4)).asformat(form)
    graph = Graph.from_scipy(matrix)
    assert (graph.num_rows, graph.num_cols) == (3, 4)
    # The matrix's stored values are weights in edge-id order.
    data = matrix.data if form in ("csr", "csc", "coo") else matrix.tocsr().data
    x = rand(4, 2)
    got = ops.spmm(graph, x, torch.tensor(data))
    torch.testing.assert_close(got, torch.tensor(matrix.toarray()) @ x)


def test_from_scipy_keeps_duplicates_and_ignores_spare_room():
    double = sp.coo_matrix((np.ones(3), ([0, 0, 1], [1, 1, 0])), shape=(2, 2))
    assert edges(Graph.from_scipy(double)) == [[0, 1], [0, 1], [1, 0]]
    matrix = sp.csr_matrix(np.eye(3))
    matrix.indices = np.concatenate([matrix.indices, [77]]).astype(np.int32)
    assert Graph.from_scipy(matrix).indices.tolist() == [0, 1, 2]


def _csr(make):
    return [make([0, 3, 3, 3]), make([2, 0, 1]), make([1, 0, 2])]


def _of_sparse(form):
    """Index arrays of a sparse matrix of torch, which shares them, and the graph of it."""
    make = getattr(torch, f"sparse_{form}_tensor")
    arrays = _csr(torch.tensor)[:2]
    return arrays, gnnaccel.as_graph(make(*arrays, torch.ones(3), (3, 3)))


def _of_scipy(form):
    matrix = getattr(sp, f"{form}_matrix")(([1.0, 2, 3], [2, 0, 1], [0, 3, 3, 3]), (3, 3))
    return [matrix.indptr, matrix.indices], Graph.from_scipy(matrix)


def _of(build, arrays, **options):
    return arrays, build(*arrays, **options)


USERS_ARRAYS = {
    "csr, NumPy": lambda: _of(Graph.from_csr, _csr(np.array)),
    "csr, tensors": lambda: _of(Graph.from_csr, _csr(torch.tensor)),
    "csr, not checked": lambda: _of(Graph.from_csr, _csr(torch.tensor), check=False, num_cols=3),
    "coo": lambda: _of(Graph.from_coo, [torch.tensor([0, 0, 1]), torch.tensor([2, 0, 1])], num_rows=3),
    "edge_index": lambda: _of(gnnaccel.as_graph, [torch.tensor([[0, 0, 1], [2, 0, 1]])]),
    "torch.sparse CSR": lambda: _of_sparse("csr"),
    "torch.sparse CSC": lambda: _of_sparse("csc"),
    "scipy CSR": lambda: _of_scipy("csr"),
    "scipy CSC": lambda: _of_scipy("csc"),
}


@pytest.mark.parametrize("name", USERS_ARRAYS)
def test_writes_into_the_users_arrays_do_not_reach_a_graph(name):
    arrays, graph = USERS_ARRAYS[name]()
    before = edges(graph), edges(graph.transposed)
    for array in arrays:
        array[...] = 99
    assert (edges(graph), edges(graph.transposed)) == before


@pytest.mark.parametrize("convert", [Graph.from_scipy, gnnaccel.as_graph])
def test_scipy_that_sorts_in_place(convert):
    matrix = sp.csr_matrix(([1.0, 0, 3], [2, 0, 1], [0, 3, 3, 3]), (3, 3))
    graph = convert(matrix)
    matrix.max()  # sorts
    matrix.eliminate_zeros()  # shortens
    assert graph.indices.tolist() == [2, 0, 1]


def test_arrays_that_are_handed_over():
    arrays = _csr(torch.tensor)
    graph = Graph.from_csr(*arrays, copy=False)
    assert [t.data_ptr() for t in (graph.indptr, graph.indices, graph.edge_ids)] == [t.data_ptr() for t in arrays]


@pytest.mark.parametrize("name", graphs.NAMES)
def test_transposed(name):
    graph = graphs.make(name)
    turned = graph.transposed
    assert turned is graph.transposed
    assert turned.transposed is graph
    assert edges(turned) == [[c, r] for r, c in edges(graph)]
    assert graph.to("cpu") is graph


def test_copies_and_pickles():
    graph = graphs.make("power_law")
    assert graph.transposed
    copies = [copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), copy.copy(graph)]
    for other in (*copies, copy.deepcopy(graph.transposed).transposed):
        assert edges(other) == edges(graph)
        assert edges(other.transposed) == edges(graph.transposed)
    assert all(other.transposed.transposed is other for other in copies[:2])
    assert graph.transposed.transposed is graph


def test_what_is_derived_from_a_graph_lives_with_it():
    class Derived:
        pass

    graph = Graph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]))
    kept = graph.slot("derived", Derived)
    assert graph.slot("derived", Derived) is kept and graph.slot("other", Derived) is not kept
    others = [graph.transposed, copy.copy(graph), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))]
    assert not any(hasattr(other.slots, "derived") for other in others), "made again, of what is theirs"
    alive = weakref.ref(kept)
    del kept, graph, others
    assert alive() is None


def test_a_dropped_graph_is_freed_at_once():
    gc.disable()
    try:
        graph = Graph.from_coo(torch.arange(6), torch.arange(6).flip(0))
        x = rand(graph.num_cols, 3).requires_grad_()
        ops.spmm(graph, x, rand(graph.nnz).requires_grad_()).sum().backward()
        parts = (graph, graph.indptr, graph.transposed, graph.transposed.indptr)
        alive = [weakref.ref(part) for part in parts]
        del parts, graph
        assert [ref() for ref in alive] == [None] * 4
    finally:
        gc.enable()


def test_a_transposed_graph_outlives_the_one_it_was_made_from():
    graph = Graph.from_coo(torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 2, 2]))
    want, arrays = edges(graph), (graph.indptr, graph.indices, graph.edge_ids)
    turned = graph.transposed
    del graph
    back = turned.transposed
    assert edges(back) == want
    assert all(a is b for a, b in zip((back.indptr, back.indices, back.edge_ids), arrays, strict=True))  # not rebuilt
    assert turned.transposed is back and back.transposed is turned


def test_graph_made_under_inference_mode_can_train():
    with torch.inference_mode():
        graph = Graph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]))
        direct = Graph.from_csr(torch.tensor([0, 1]), torch.tensor([0]))
        ops.spmm(graph, torch.ones(2, 3))
        assert graph.transposed
    for each in (graph, direct):
        x = torch.ones(each.num_cols, 3, requires_grad=True)
        ops.spmm(each, x, torch.ones(each.nnz, requires_grad=True)).sum().backward()
        assert x.grad.shape == x.shape


def under_grad(use):
    """A transform of torch.func wraps what is made inside it."""
    torch.func.grad(lambda t: [use(), t.sum()][1])(torch.ones(2))


def under_jvp(use):
    torch.func.jvp(lambda t: [use(), t.sum()][1], (torch.ones(2),), (torch.ones(2),))


def inferring_under_grad(use):
    under_grad(torch.inference_mode()(use))


def under_fake_tensors(use):
    with FakeTensorMode(allow_non_fake_inputs=True):
        use()


def under_export(use):
    class Module(torch.nn.Module):
        def forward(self, x):
            use()
            return x + 1

    torch.export.export(Module(), (torch.ones(2),), strict=False)


MODES = [under_grad, under_jvp, inferring_under_grad, under_fake_tensors, under_export]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("given_ids", [True, False])
def test_what_a_mode_made_does_not_outlive_it(mode, given_ids):
    graph = Graph.from_csr([0, 2, 3], [1, 0, 1], [2, 0, 1] if given_ids else None)
    mode(lambda: (graph.transposed, graph.incidence))
    assert edges(graph.transposed) == [pair[::-1] for pair in edges(graph)]
    x, w = rand(2, 3).requires_grad_(), rand(3, 3).requires_grad_()
    (ops.spmm(graph, x) + ops.spmm(graph, None, w, "copy_rhs")).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[1.0], [2.0]]).expand(2, 3).to(x.dtype)) and torch.all(w.grad == 1)


@pytest.mark.parametrize("mode", MODES[:3])
def test_a_graph_made_inside_a_transform_serves_outside(mode):
    made = []
    mode(lambda: made.append(Graph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]))))
    assert edges(made[0]) == [[0, 1], [1, 0], [1, 1]]
    assert torch.equal(ops.spmm(made[0], torch.ones(2, 1)), torch.tensor([[1.0], [2.0]]))


@pytest.mark.parametrize("mode", [under_grad, under_fake_tensors, under_export])
@pytest.mark.parametrize("call", [gnnaccel.prepare, lambda g: gnnaccel.prepare(g, reorder="communities"),
                                  gnnaccel.renumber, advise])  # fmt: skip
def test_graphs_are_prepared_outside_such_modes(mode, call):
    graph = Graph.from_csr([0, 2, 3], [1, 0, 1])
    with pytest.raises(RuntimeError, match=r"call it outside torch\.func's transforms"):
        mode(lambda: call(graph))
    call(graph)


def test_a_kernel_needs_memory():
    with pytest.raises(RuntimeError, match=r"expected a tensor with memory, got a Tensor of \(3,\)"):
        _library.pointer(torch.empty(3, device="meta"))
    assert _library.pointer(torch.empty(0)) == 0


def test_results_do_not_depend_on_threads():
    for name, width in [("one_hub", 65), ("power_law", 300)]:
        graph = graphs.make(name)
        x, v = rand(graph.num_cols, width).float(), rand(graph.num_rows, width).float()
        w = rand(graph.nnz, 1).float()

        def run(graph=graph, x=x, v=v, w=w):
            a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
            found = [ops.spmm(graph, a, b, "mul", reduce) for reduce in ("sum", "mean", "max")]
            found += [ops.edge_softmax(graph, b.expand(-1, 40)), ops.sddmm(graph, a, v)]
            return [*found, *torch.autograd.grad(sum((t * t).sum() for t in found), (a, b))]

        torch.set_num_threads(1)
        want = run()
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            # Sums over features are torch's own in the gradient of b, and it may split those differently.
            for got, one in zip(run()[:-1], want[:-1], strict=True):
                assert torch.equal(got, one)


def big_case():
    graph = graphs.make("one_hub")
    x, w = rand(graph.num_cols, 64).float(), rand(graph.nnz, 1).float()
    return lambda: ops.spmm(graph, x, w)


def test_threads_may_call_at_once():
    run = big_case()
    torch.set_num_threads(2)
    want, wrong = run(), []

    def work():
        wrong.extend(None for _ in range(20) if not torch.equal(run(), want))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork on this platform")
def test_fork_after_use():
    """A data loader's worker: forked after the parent has used its threads, told to use one itself."""
    run = big_case()
    torch.set_num_threads(2)
    want = run()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that hangs dies, and fails the test
        try:
            torch.set_num_threads(1)
            os._exit(0 if torch.equal(run(), want) else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(run(), want)


# ---- Bad input. Each row: what is called, the exception, words its message must contain. ----

G = graphs.make("tall")  # 90 rows, 7 columns, 200 edges
X, V, W = rand(7, 4), rand(90, 4), rand(200)

BAD_GRAPHS = {
    "index_too_large": (lambda: Graph.from_coo([0, 1], [0, 9], num_cols=9), ValueError, "cols [0, 9) 9 position"),
    "index_negative": (lambda: Graph.from_coo([0, -1], [0, 0]), ValueError, "rows got -1 at position 1"),
    "row_too_large": (lambda: Graph.from_coo([5], [0], num_rows=5), ValueError, "rows num_rows got 5"),
    "csr_index_too_large": (lambda: Graph.from_csr([0, 1], [3], num_cols=3), ValueError, "indices [0, 3) got 3"),
    "csr_index_negative": (lambda: Graph.from_csr([0, 1], [-3]), ValueError, "indices got -3 at position 0"),
    "lengths": (lambda: Graph.from_coo([0, 1], [0]), ValueError, "rows cols 2 1"),
    "descending": (lambda: Graph.from_csr([0, 3, 1, 3], [0, 0, 0]), ValueError, "indptr ascending row 1"),
    "wraps_int32": (
        # The differences of these offsets are all positive in 32 bits.
        lambda: Graph.from_csr(torch.tensor([0, INT_MAX, -2, 3], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)),
        ValueError,
        "indptr ascending",
    ),
    "start": (lambda: Graph.from_csr([1, 3], [0, 0, 0]), ValueError, "indptr start at 0 got 1"),
    "end": (lambda: Graph.from_csr([0, 2], [0, 0, 0]), ValueError, "indptr nnz = 3 got 0 and 2"),
    "no_indptr": (lambda: Graph.from_csr([], []), ValueError, "indptr got none"),
    "edge_ids_length": (lambda: Graph.from_csr([0, 2], [0, 0], [0]), ValueError, "edge_ids 2 entries got 1"),
    "edge_ids_range": (lambda: Graph.from_csr([0, 2], [0, 0], [0, 2]), ValueError, "edge_ids [0, 2) got 2"),
    "edge_ids_twice": (lambda: Graph.from_csr([0, 2], [0, 0], [1, 1]), ValueError, "edge_ids once repeated"),
    "float": (lambda: Graph.from_coo([0.0], [0]), TypeError, "rows int32 or int64 float32"),
    "bool": (lambda: Graph.from_csr([0, 1], np.array([True])), TypeError, "indices int32 or int64 bool"),
    "none": (lambda: Graph.from_coo(None, [0]), TypeError, "rows integers NoneType"),
    "text": (lambda: Graph.from_csr("abc", [0]), TypeError, "indptr integers str"),
    "two_dimensions": (lambda: Graph.from_coo([[0]], [[0]]), ValueError, "rows 1-D (1, 1)"),
    "sparse": (lambda: Graph.from_coo(torch.tensor([0, 1]).to_sparse(), [0, 0]), ValueError, "rows dense"),
    "negative_size": (lambda: Graph.from_coo([], [], num_rows=-2), ValueError, "num_rows at least 0 got -2"),
    "negative_cols": (lambda: Graph.from_csr([0], [], num_cols=-1), ValueError, "num_cols at least 0 got -1"),
    "size_type": (lambda: Graph.from_coo([0], [0], num_cols=2.0), TypeError, "num_cols int float"),
    "scipy_type": (lambda: Graph.from_scipy(np.eye(2)), TypeError, "from_scipy matrix scipy.sparse ndarray"),
    "meta": (lambda: Graph.from_csr(torch.tensor([0], device="meta"), []), ValueError, "one device meta"),
}

BAD_CALLS = {
    "graph_type": (lambda: ops.spmm(torch.eye(3), X), TypeError, "spmm graph gnnaccel.Graph Tensor as_graph"),
    "x_type": (lambda: ops.spmm(G, [1.0]), TypeError, "spmm x torch.Tensor list"),
    "x_missing": (lambda: ops.spmm(G, None), TypeError, "spmm x NoneType"),
    "x_rows": (lambda: ops.spmm(G, V), ValueError, "spmm x 7 num_cols (90, 4)"),
    "x_scalar": (lambda: ops.spmm(G, torch.tensor(1.0)), ValueError, "spmm x 7 rows ()"),
    "x_int": (lambda: ops.spmm(G, X.long()), TypeError, "spmm x floating-point int64 .float()"),
    "x_complex": (lambda: ops.spmm(G, X + 0j), TypeError, "spmm x complex128"),
    "x_half": (lambda: ops.spmm(G, X.half()), TypeError, "spmm x float16 CUDA bfloat16"),
    "x_device": (lambda: ops.spmm(G, X.to("meta")), ValueError, "spmm x device cpu meta"),
    "x_sparse": (lambda: ops.spmm(G, X.to_sparse()), TypeError, "spmm x dense to_dense"),
    "weight_missing": (lambda: ops.spmm(G, X, None, "mul"), TypeError, "spmm weight NoneType"),
    "weight_rows": (lambda: ops.spmm(G, X, W[:-1]), ValueError, "spmm weight 200 (199,)"),
    "weight_shape": (lambda: ops.spmm(G, X, rand(200, 3)), ValueError, "spmm weight (3,) broadcast (4,)"),
    "weight_dtype": (lambda: ops.spmm(G, X, W.float()), TypeError, "spmm weight float64 float32"),
    "message": (lambda: ops.spmm(G, X, W, "pow"), ValueError, "spmm message copy_lhs 'pow'"),
    "reduce": (lambda: ops.spmm(G, X, reduce="prod"), ValueError, "spmm reduce mean 'prod'"),
    "op": (lambda: ops.sddmm(G, X, V, "cross"), ValueError, "sddmm op dot 'cross'"),
    "target": (lambda: ops.sddmm(G, X, V, "dot", "x"), ValueError, "sddmm lhs_target 'x'"),
    "swapped": (lambda: ops.sddmm(G, V, X), ValueError, "sddmm lhs 7 'u' (90, 4)"),
    "dot_lengths": (lambda: ops.sddmm(G, X, V[:, :1]), ValueError, "sddmm dot equal last (7, 4) (90, 1)"),
    "dot_flat": (lambda: ops.sddmm(G, rand(7, 7), rand(7), "dot", "u", "u"), ValueError, "sddmm rhs dot (7,)"),
    "sddmm_shapes": (lambda: ops.sddmm(G, X, rand(90, 3), "add"), ValueError, "sddmm rhs (3,) broadcast (4,)"),
    "sddmm_dtype": (lambda: ops.sddmm(G, X, V.float()), TypeError, "sddmm rhs float64 float32"),
    "scores_rows": (lambda: ops.edge_softmax(G, rand(90)), ValueError, "edge_softmax scores 200 (90,)"),
    "norm_by": (lambda: ops.edge_softmax(G, W, "row"), ValueError, "edge_softmax norm_by dst 'row'"),
    "segment_end": (lambda: ops.segment_reduce(X, [0, 8]), ValueError, "segment_reduce offsets nnz = 7 got 0 and 8"),
    "segment_order": (lambda: ops.segment_reduce(X, [0, 5, 3, 7]), ValueError, "segment_reduce offsets descent row 1"),
    "segment_dtype": (lambda: ops.segment_reduce(X, [0.0, 7.0]), TypeError, "segment_reduce offsets int64 float32"),
    "segment_reduce": (lambda: ops.segment_reduce(X, [0, 7], "mul"), ValueError, "segment_reduce reduce 'mul'"),
    "segment_x": (lambda: ops.segment_reduce(3.0, [0, 7]), TypeError, "segment_reduce x torch.Tensor float"),
    "segment_scalar": (lambda: ops.segment_reduce(torch.tensor(1.0), [0]), ValueError, "segment_reduce x ()"),
}


@pytest.mark.parametrize("name", [*BAD_GRAPHS, *BAD_CALLS])
def test_bad_input(name):
    call, error, words = {**BAD_GRAPHS, **BAD_CALLS}[name]
    with pytest.raises(Exception) as raised:
        call()
    assert type(raised.value) is error, repr(raised.value)
    message = str(raised.value)
    if name in BAD_GRAPHS:
        assert message.startswith("Graph")
    for word in words.split(" "):
        assert word in message, f"{word!r} is not in {message!r}"


def test_cuda_without_the_cuda_half():
    if _library.has_cuda_kernels():
        pytest.skip("this build has its CUDA half")
    with pytest.raises(RuntimeError, match=r"built without its CUDA half.*GNNACCEL_CUDA=ON.*move the tensors"):
        _library.launch("spmm", torch.device("cuda"))


@pytest.mark.parametrize("permuted", [False, True])
def test_with_self_loops(permuted):
    rows, cols = torch.tensor([1, 1, 0, 0, 0]), torch.tensor([0, 1, 1, 2, 0])
    given = Graph.from_coo(rows, cols, num_rows=4, num_cols=4)
    if permuted:  # ids that are not positions
        given = Graph.from_csr(
            given.indptr, given.indices, torch.tensor([4, 2, 3, 0, 1], dtype=torch.int32), num_cols=4
        )
    assert edges(given.with_self_loops()) == [*edges(given), [2, 2], [3, 3]]
    assert given.with_self_loops().with_self_loops().nnz == 7
    with pytest.raises(ValueError, match="as many rows as columns"):
        Graph.from_coo([0], [1], num_rows=1, num_cols=2).with_self_loops()


def test_incidence_is_that_of_the_edge_ids():
    """Of graphs that share an indptr too."""
    indptr, indices, feats = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 0]), torch.tensor([[1.0], [10.0], [100.0]])
    for ids in (None, torch.tensor([2, 0, 1])):
        graph = Graph.from_csr(indptr, indices, ids)
        torch.testing.assert_close(ops.spmm(graph.incidence, feats), ops.spmm(graph, None, feats, "copy_rhs"))
        assert graph.incidence is graph.incidence
