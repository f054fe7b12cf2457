"""Properties of graphs against sets of Python."""

import itertools
import statistics

import pytest
import torch
from test_translate import GRAPHS

from gnnaccel import tiles
from gnnaccel.graph.csr import Graph
from gnnaccel.planning.properties import SHAPES, properties


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "large ids"])
def test_matches_sets(name):
    graph = GRAPHS[name]()
    indptr, indices = graph.indptr.tolist(), graph.indices.tolist()
    rows = [indices[a:b] for a, b in itertools.pairwise(indptr)]
    known, degrees, sets = properties(graph), [len(r) for r in rows], [set(r) for r in rows]
    assert (known.nodes, known.edges) == (graph.num_rows, graph.nnz)
    assert known.repeated_edges == graph.nnz - sum(map(len, sets))
    assert known.degree_max == max(degrees, default=0) and known.empty_rows == degrees.count(0)
    assert known.degree_mean == pytest.approx(statistics.fmean(degrees) if degrees else 0)
    assert known.degree_deviation == pytest.approx(statistics.pstdev(degrees) if degrees else 0)
    pairs = [len(a & b) / len(a | b) for a, b in itertools.pairwise(sets) if a and b]
    assert known.similarity == pytest.approx(statistics.fmean(pairs) if pairs else 0, abs=1e-6)
    for count, (height, width) in zip(known.tiles, SHAPES, strict=True):
        places = {(r // height, c // width) for r, row in enumerate(rows) for c in row}
        assert (count.height, count.width, count.plain) == (height, width, len(places))
        assert count.translated == tiles.of(graph, height, width).num_blocks
        assert count.saved == pytest.approx(1 - count.translated / len(places) if places else 0)


def test_tiles_pay_where_rows_share_columns():
    rows, cols = torch.meshgrid(torch.arange(32), torch.arange(0, 320, 20), indexing="ij")
    dense = properties(Graph.from_coo(rows.flatten(), cols.flatten(), num_cols=320))
    assert dense.similarity == 1 and all(count.is_profitable and count.density == 1 for count in dense.tiles)
    assert dense.tiles[0].plain > dense.tiles[0].translated == 4
    assert not properties(GRAPHS["random"]()).tiles[0].is_profitable
