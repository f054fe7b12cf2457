"""Writes docs/coverage.md: what runs on gnnaccel's kernels and what the frameworks run, found by running it.

python scripts/coverage_page.py [--check]    --check writes nothing and exits 1 if the file is not up to date
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "coverage.md"

_HEAD = """# What is accelerated

Written by `python scripts/coverage_page.py`, which runs every case of `tests/pyg_cases.py` and `tests/dgl_cases.py`
with the plug-in on and reads `gnnaccel.report`; for a case that needs a module beside PyG it says what the tests find
where that is installed. The same cases are compared with the frameworks alone by `tests/test_pyg_matrix.py` and
`tests/test_dgl_matrix.py`: outputs and all gradients; those of DGL on CUDA graphs too, by `tests/test_dgl_cuda.py`.

"""
_PYG = """## PyTorch Geometric 2.8: layers of torch_geometric.nn.conv

- **spmm**: sums, means and extrema over edges; no message per edge in memory.
- **attention**: scores, softmax and weighted sum; at most one number per edge and head in memory.
- **message**: other elementwise messages ([messages.md](messages.md)), computed and reduced in one walk over the edges
  (on CUDA without NVRTC stored, or made in blocks of edges where those of a call are large). No
  message per edge in memory then, unless the layer itself maps edge features to full width (noted).
  Where the messages are few PyG's own code may run, which stores them: Python's part of ours takes longer than they do.
  [Bounds](bounds.md#messages) has how many that is, by layer: `FEW_MESSAGES`, and what a number counts there. On CUDA
  none are left in FiLMConv, LEConv, HGTConv and gates, nor where `torch.use_deterministic_algorithms(True)` asks for
  sums in a fixed order.
- **blocks**: messages with a linear map of edges that is none of nodes. Where those of a call take more than
  `STORED_BYTES`, they are made and reduced in blocks of edges, and made again in the backward pass; fewer are stored.
- **segment**: PyG's own message() makes one message per edge, our kernels reduce them.
- **pyg**: PyG's own code.

On CUDA the first call of a layer on an `edge_index` is PyG's own where its messages are few (`FEW_AT_FIRST`): the
edges of a sampled batch are used once, and sorting them takes the host longer than it gains. From its second call on
the same edges on, and after `gnnaccel.prepare`, all run as listed. Deterministic mode and checkpoints have no such
call.

On the CPU {count} of the {total} message passing layers run without a message per edge (spmm, attention, message or
blocks, these once their messages pass that size).

| layer and options | runs as | note |
|---|---|---|
{rows}

A layer of yours is treated the same way: `message()` gets features that are not gathered yet, and what it does to
them decides. `GNNACCEL_PROFILE=1` prints the reason for each layer that stores messages.

Inside torch.compile, layers of copied and weighted messages and of attention run on the same ops, and PyG's code of the
others is traced whole: [compile.md](compile.md).

`HeteroLinear` runs on gnnaccel's products of sorted rows. `HeteroDictLinear` outside HGTConv and HANConv is PyG's own
code: its rows lie by type already, and a product of torch's BLAS for each type is all that it does. On the CPU one node
of autograd for all types, and all rows put together for `ops.grouped_matmul`, were no faster at the sizes that count.

Left to PyG, and counted, whatever the layer: explain mode, decomposed layers, hooks on message passing, replaced
methods, TorchScript, torch.export, torch.func and forward-mode differentiation, own propagate() methods, features that
are not floating point. Layers whose code writes in place, uses autograd functions
of its own or modules that are not torch's or PyG's get gathered features (`segment`). Aggregations that need every
message (median, quantile, LSTM, sort ...) get them.

"""
_DGL = """## DGL 2.1.0

User-defined message and reduce functions, and the layers that DGL writes as such, run as [messages.md](messages.md)
says; those of few messages (`FEW_MESSAGES`) DGL's way, which is the faster one there.

Of {total} cases {accelerated} are accelerated, {partly} partly. {framework} are DGL's own, none of which passes
messages that our ops could run: {without} pass none, {library} need a library of their own, {outside} are not run.

| group | case | runs on | reason |
|---|---|---|---|
{rows}

## Where results differ from the frameworks alone

DGL:

- Of equal values, a maximum or minimum is the first in row order and gets the gradient. DGL promises no order.
- A maximum or minimum of values with NaN is left to DGL, whose kernels skip NaN; over several edge types at once it is
  NaN.
- A maximum over a graph without edges has no gradient; DGL's goes to node 0.
- Ops over several edge types of which the first has no edges: the sum of the others. DGL alone returns zeros, or memory
  it never wrote, and an error where another one has none.
- Second derivatives through `edge_softmax`, `GATConv` and `GATv2Conv` are right; DGL's are not, or raise.
- Some calls that DGL refuses work: bfloat16 segments, features of width 0, graphs restricted to one sparse format.
- Writing in place into the features after a layer of fewer outputs than inputs that has no other use for them
  (`GraphConv` with norm "both" or "left", `RelGraphConv` without its self-loop) or after `PNAConv`, and before its
  backward pass, raises torch's error: the features themselves are kept, where DGL keeps what it made of them.
- A `HeteroGraphConv` whose layers are taken together is one node of autograd for all node types: two backward passes,
  each from another type's result, want `retain_graph=True` in the first, as they do after a second such layer in DGL.

PyG:

- The gradient of a maximum or minimum goes to one of several equal winners; PyG's plain path divides it. Where the
  extreme is exactly 0, torch's `scatter_reduce` counts its own start among the winners, so that of n equal zeros PyG's
  sources get n / (n + 1) of the gradient, a single one half of it; ours get all of it.
- With an `edge_index` of int32, gradients of `scatter_add` on the CPU are wrong in torch 2.13 (`gather` misreads
  an expanded int32 index), and so are PyG's. Those of accelerated layers equal those of int64, whichever of PyG's
  helpers and aggregations they use; what a layer's own code scatters with torch is torch's.
- Writing in place into the features after a layer whose edge weight needs a gradient, or that runs as "message"
  (`x += conv(x, index, weight)`), raises torch's error: the features themselves are kept for the backward pass, where
  PyG keeps one copy per edge.
- A `HeteroConv` whose layers are taken together is one node of autograd for all node types: two backward passes,
  each from another type's result, want `retain_graph=True` in the first, as they do after a second such layer in PyG.
- A write into the tensors that a torch.sparse matrix (CSR, CSC or COO) was made of goes unseen, as torch does not tell
  of it: call `gnnaccel.invalidate(matrix)` after one. Writes into the matrix's own `col_indices()`, `indices()` and so
  on are noticed, as are all into an `edge_index`, an EdgeIndex and what that was made of.
"""


def pyg_rows() -> list[tuple[str, str, str]]:
    """(layer and options, how it runs, reason) of every case."""
    import torch
    from pyg_cases import CASES, Inputs, SeenOps, observed, prepare_pyg

    from gnnaccel import pyg_backend, report

    prepare_pyg()
    rows = []
    for name, case in CASES.items():
        if case.needs:  # as declared, which the tests compare where it is installed: one page for every machine
            rows.append((name, case.runs, "; ".join(filter(None, (case.why, f"PyG needs {case.needs} for it")))))
            continue
        torch.manual_seed(0)
        inputs = Inputs(dtype=case.dtypes[0])
        layer = case.make().to(inputs.dtype)
        pyg_backend.accelerate(layer)
        arguments = case.arguments(inputs)
        report.reset()
        with SeenOps(inputs.num_edges) as seen, torch.no_grad():
            layer(*arguments)
        how, why = observed(report.snapshot(), seen.names)
        rows.append((name, how, f"{case.why} ({why})" if how == "segment" else why))
    report.reset()
    return rows


def page() -> str:
    """The text of docs/coverage.md."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]
    warnings.simplefilter("ignore")
    from coverage_dgl import dgl_rows

    rows, dgl = pyg_rows(), dgl_rows()
    layers = {name.split()[0] for name, _, _ in rows}
    free = {name.split()[0] for name, how, _ in rows if how in ("spmm", "attention", "message", "blocks")}
    parts = [
        _HEAD,
        _PYG.format(count=len(free), total=len(layers), rows=_table(rows)),
        _DGL.format(rows=_table(dgl), **_counts(dgl)),
    ]
    return "".join(parts)


def _counts(rows: list[tuple[str, str, str, str]]) -> dict[str, int]:
    """How many cases of DGL run how."""
    own = [(group, reason) for group, _, how, reason in rows if how == "framework"]
    counts = {how: sum(row[2] == how for row in rows) for how in ("accelerated", "partly", "framework")}
    counts["outside"] = sum(group == "not run" for group, _ in own)
    counts["library"] = sum(reason.startswith("needs ") for _, reason in own)
    counts["without"] = sum(reason.startswith(("no message passing", "returns its argument")) for _, reason in own)
    if counts["outside"] + counts["library"] + counts["without"] != len(own):
        raise RuntimeError("a case of DGL's own for none of the reasons that the page knows")
    return {**counts, "total": len(rows)}


def _table(rows) -> str:
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print(
            "docs/coverage.md is up to date"
            if same
            else "docs/coverage.md is out of date: run scripts/coverage_page.py"
        )
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
