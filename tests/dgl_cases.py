"""Everything DGL's message passing can do, as one table: `CASES`, name -> Case (see dgl_compare.Case).

Read by tests/test_dgl_matrix.py, which compares each case with DGL alone, and by scripts/coverage_dgl.py, which runs
each once and prints what was accelerated. A name is a function's or class's with its options in brackets, so that
"SAGEConv('gcn')" covers SAGEConv. Importable without pytest.
"""

from dgl_compare import Case
from dgl_function_cases import function_cases
from dgl_hetero_cases import hetero_cases
from dgl_layer_cases import layer_cases

CASES: dict[str, Case] = function_cases() | hetero_cases() | layer_cases()

OUTSIDE = {
    "DeepWalk": "random walks and embeddings",
    "HeteroSubgraphX": "as SubgraphX, on the message passing of the model it explains",
    "KNNGraph": "builds a graph",
    "MetaPath2Vec": "random walks and embeddings",
    "NodeEmbedding": "a table of rows in shared memory",
    "RadiusGraph": "builds a graph",
    "SubgraphX": "runs the model it explains; DGL 2.1.0's own code fails with numpy 2",
    "SegmentedKNNGraph": "builds a graph",
}
"""Modules of dgl.nn.pytorch that pass no messages themselves and are not run: what each does instead."""
