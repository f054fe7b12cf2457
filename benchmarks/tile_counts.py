"""What sparse graph translation saves (TC-GNN, Figure 7): blocks with an edge, as the matrix lies and translated.

    python benchmarks/tile_counts.py --csv out.csv
    python benchmarks/tile_counts.py --graphs cora pubmed artist-like arxiv-like:sorted --files FOLDER/dd.npz

Graphs that ship with gnnaccel, stand-ins by graphs.py, files that `Graph.load` takes. Counts only: any machine will do.
The paper's mean saving is 67 % of the blocks, over its graphs. `gnnaccel inspect` prints the same for one graph.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import graphs
import torch
from timing import provenance, save_table, shown

from gnnaccel import data
from gnnaccel.graph.csr import Graph
from gnnaccel.planning.properties import properties

GRAPHS = ("cora", "citeseer", "pubmed", "artist-like", "blogcatalog-like", "amazon0505-like", "amazon0505-like:sorted",
          "yeast-like", "arxiv-like", "arxiv-like:sorted")  # fmt: skip
COLUMNS = ("graph", "nodes", "edges", "similarity", "shape", "plain", "translated", "saved", "density", "reuse")


def load(name: str) -> Graph:
    if name in data.names():
        return Graph.load(data.find(name))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = graphs.generate(name, device)
    return Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="*", default=list(GRAPHS))
    parser.add_argument("--files", nargs="*", default=[], type=Path)
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    head = provenance(args.commit, "blocks with an edge in them; saved: the part that translation saves")
    lines = []
    loaded = itertools.chain(((n, load(n)) for n in args.graphs), ((f.stem, Graph.load(f)) for f in args.files))
    for name, graph in loaded:
        known = properties(graph)
        for tiles in known.tiles:
            row = {"graph": name, "nodes": known.nodes, "edges": known.edges, "similarity": known.similarity}
            row |= {"shape": f"{tiles.height}x{tiles.width}", "plain": tiles.plain, "translated": tiles.translated}
            row |= {"saved": tiles.saved, "density": tiles.density, "reuse": tiles.column_reuse}
            lines.append(shown(COLUMNS, row))
    if args.csv:
        save_table(args.csv, head, COLUMNS, lines)


if __name__ == "__main__":
    main()
