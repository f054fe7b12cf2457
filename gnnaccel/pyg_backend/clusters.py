"""PyG's ClusterData where METIS is not installed: parts that gnnaccel makes, or pymetis where that is."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

from torch import Tensor

from gnnaccel import report
from gnnaccel.graph.csr import Graph
from gnnaccel.parts.assign import assign
from gnnaccel.pyg_backend.compressed import check_nodes

_KIND = "pyg.ClusterData"


def parting(original: Callable) -> Callable:
    """ClusterData._metis, which needs none of pyg-lib and torch-sparse."""

    def _metis(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        check_nodes(edge_index.as_subclass(Tensor), num_nodes)
        try:
            return original(self, edge_index, num_nodes)
        except ImportError:
            pass
        method = "metis" if importlib.util.find_spec("pymetis") is not None else "communities"
        if method == "communities":
            report.note(_KIND, "no METIS is installed: parts are made of gnnaccel's communities", logging.WARNING)
        with report.accelerated(_KIND):
            sources, destinations = edge_index.as_subclass(Tensor).unbind()
            graph = Graph.from_coo(destinations, sources, num_rows=num_nodes, num_cols=num_nodes)
            return assign(graph, min(self.num_parts, max(num_nodes, 1)), method, by_nodes=True)

    return _metis
