"""DGL's and PyG's own ops and layers on the CPU, alone and on gnnaccel: forward + backward, in one process.

    python benchmarks/cpu_layers.py                                    # the whole table, default graph
    python benchmarks/cpu_layers.py --rows GATConv --repeat 5
    python benchmarks/cpu_layers.py --graph power-law amazon_computers.npz --csv out.csv

Each row is checked first: the output and every gradient of both sides must agree. Then the two sides take turns,
and the medians of --repeat runs are compared. What a framework or gnnaccel prepares once per graph is not in these
times. Rows with attention are run once more, in a fresh process for each side, for the extra peak memory of the
first forward and backward, there with everything that is prepared and kept.

The default graph: 100k nodes, 2M edges, in-degrees by a power law with a hub of about 19k, sources at random.
--graph also takes .npz files with `edge_index` [2, E] and `num_nodes`.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import json
import platform
import statistics
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from cpu_rows import Case, Row, Side, rows

from gnnaccel import report

TOLERANCE = 1e-4
MEMORY_TARGET = 4.0  # extra peak memory of attention rows of PyG: at most a quarter
COLUMNS = (
    "graph", "nodes", "edges", "threads", "framework", "row", "alone_ms", "alone_iqr_ms", "gnnaccel_ms",
    "gnnaccel_iqr_ms", "speedup", "target", "error", "alone_extra_mib", "gnnaccel_extra_mib", "less_memory", "note",
)  # fmt: skip


def power_law(num_nodes: int, num_edges: int, hub: int, seed: int = 1234) -> torch.Tensor:
    """edge_index whose node of rank r has in-degree hub * (r + 1) ** -a, with a such that they sum to num_edges.

    Sources are uniform; edges are distinct and sorted by (source, destination), as datasets come.
    """
    rank = torch.arange(1, num_nodes + 1, dtype=torch.float64)
    low, high = 0.0, 3.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if hub * rank.pow(-middle).sum() > num_edges else (low, middle)
    degree = hub * rank.pow(-low)
    # So many draws leave `degree` distinct sources.
    degree = (-num_nodes * torch.log1p(-degree / num_nodes)).round().long()
    rng = torch.Generator().manual_seed(seed)
    dst = torch.repeat_interleave(torch.randperm(num_nodes, generator=rng), degree)
    src = torch.randint(num_nodes, dst.shape, generator=rng)
    key = torch.unique(src * num_nodes + dst)
    return torch.stack([torch.div(key, num_nodes, rounding_mode="floor"), key % num_nodes])


def load(source: str, scale: float, width: int) -> Case:
    """The case of "power-law" or of an .npz file; `scale` shrinks the first."""
    if source == "power-law":
        nodes, edges, hub = (max(8, int(n * scale)) for n in (100_000, 2_000_000, 19_000))
        return Case(source, power_law(nodes, edges, hub), nodes, width)
    with np.load(source, allow_pickle=False) as data:
        edge_index = torch.from_numpy(data["edge_index"].astype(np.int64))
        return Case(Path(source).stem, edge_index, int(data["num_nodes"]), width)


def run(side: Side):
    """One switched step: its result and its time in milliseconds."""
    side.switch()
    start = time.perf_counter()
    result = side.step()
    return result, (time.perf_counter() - start) * 1e3


def error_of(expected, got) -> float:
    """Largest difference of outputs and gradients, each relative to the largest value of its tensor.

    Gradients that are zero but for rounding (TransformerConv's key bias) are held to the largest of all gradients.
    """
    (out, grads), (our_out, our_grads) = expected, got
    floor = 1e-2 * max(float(g.abs().max()) for g in grads)
    # Equal infinities (DGL's max over no edges) differ by nothing.
    differences = torch.where(out == our_out, 0.0, out - our_out).abs()
    worst = float(differences.max() / out[out.isfinite()].abs().max())
    for grad, ours in zip(grads, our_grads, strict=True):
        worst = max(worst, float((grad - ours).abs().max()) / max(float(grad.abs().max()), floor))
    return worst


def measure(row: Row, case: Case, repeat: int) -> dict:
    """Check one row, then time it."""
    alone, ours = row.build(case)
    expected = run(alone)[0]
    report.reset()
    got = run(ours)[0]
    left = {reason for site in report.snapshot().values() for reason in site.reasons}
    note = f"left to the framework: {'; '.join(sorted(left))}" if left else ""
    if not any(site.accelerated for site in report.snapshot().values()):
        note = note or "nothing was accelerated"
    error = error_of(expected, got)
    del expected, got
    times: dict[str, list[float]] = {"alone": [], "ours": []}
    for _ in range(repeat):
        for name, side in (("alone", alone), ("ours", ours)):
            times[name].append(run(side)[1])
    alone.switch()
    alone_ms, ours_ms = (statistics.median(t) for t in times.values())
    alone_iqr, ours_iqr = (float(np.subtract(*np.percentile(t, [75, 25]))) for t in times.values())
    return {
        "graph": case.name, "nodes": case.num_nodes, "edges": case.edge_index.shape[1],
        "threads": torch.get_num_threads(), "framework": row.framework, "row": row.name,
        "alone_ms": alone_ms, "alone_iqr_ms": alone_iqr, "gnnaccel_ms": ours_ms, "gnnaccel_iqr_ms": ours_iqr,
        "speedup": alone_ms / ours_ms, "target": row.target, "error": error, "note": note,
    }  # fmt: skip


# ---- Memory: one process per row and side ----


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise OSError(f"no {field} in /proc/self/status")


def extra_memory(side: Side) -> float:
    """MiB by which one step raises the resident memory of this process over what it was before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or freed memory would be used again, unseen
    before = _status_mib("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # starts the kernel's high-water mark anew
    except OSError:
        return _sampled_memory(side) - before
    result = run(side)
    peak = _status_mib("VmHWM")
    del result
    return peak - before


def _sampled_memory(side: Side) -> float:
    peak, done = _status_mib("VmRSS"), threading.Event()

    def sample():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, _status_mib("VmRSS"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        run(side)
    finally:
        done.set()
        thread.join()
    return peak


def memory_of(key: str, side: int, case: Case) -> float:
    """extra_memory() of one side of the row `key`, in this process; the first step loads code on a tiny graph."""
    row = next(r for r in rows(case.width) if r.key == key)
    tiny = Case("tiny", torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4, case.width)
    run(row.build(tiny)[side])
    return extra_memory(row.build(case)[side])


def memory_in_child(row: Row, side: int, source: str, options) -> float | None:
    """memory_of() in a fresh process, or None (with its last words) if that failed."""
    command = [sys.executable, __file__, "--memory-of", row.key, str(side), "--graph", source]
    command += ["--scale", str(options.scale), "--width", str(options.width), "--threads", str(options.threads)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        print(f"  memory of {row.key} not measured: {child.stderr.strip()[-200:]}", file=sys.stderr)
        return None
    return json.loads(child.stdout.splitlines()[-1])


# ---- The table ----


def verdict(value: float, target: float | None, suffix: str = "x") -> str:
    if target is None:
        return ""
    return f"{target:g}{suffix} {'reached' if value >= target else 'MISSED'}"


def markdown(results: list[dict]) -> str:
    """One table per graph."""
    blocks = []
    for name in dict.fromkeys(r["graph"] for r in results):
        part = [r for r in results if r["graph"] == name]
        lines = [
            f"**{name}**: {part[0]['nodes']:,} nodes, {part[0]['edges']:,} edges, {part[0]['threads']} threads",
            "",
            "| | alone, ms | gnnaccel, ms | speedup | target | error | extra memory, MiB | |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for r in part:
            cells = [
                f"{r['framework']}: {r['row']}",
                f"{r['alone_ms']:.1f} (±{r['alone_iqr_ms'] / 2:.1f})",
                f"{r['gnnaccel_ms']:.1f} (±{r['gnnaccel_iqr_ms'] / 2:.1f})",
                f"{r['speedup']:.2f}x",
                verdict(r["speedup"], r["target"]),
                f"{r['error']:.0e}" + ("" if r["error"] <= TOLERANCE else " WRONG"),
                _memory_cell(r),
                r["note"],
            ]
            lines.append(f"| {' | '.join(cells)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _memory_cell(result: dict) -> str:
    if not result.get("less_memory"):
        return ""
    cell = f"{result['alone_extra_mib']:.0f} -> {result['gnnaccel_extra_mib']:.0f}, {result['less_memory']:.1f}x less"
    target = MEMORY_TARGET if result["framework"] == "PyG" else None
    return f"{cell} {verdict(result['less_memory'], target)}".strip()


def versions() -> str:
    """What was measured, in one line."""
    from importlib.metadata import PackageNotFoundError, version

    from gnnaccel import __version__, _library

    found = [f"gnnaccel {__version__} ({_library.isa()})", f"torch {torch.__version__}"]
    for name in ("dgl", "torch_geometric"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return f"{', '.join(found)}; {_cpu()}, Python {platform.python_version()}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} logical CPUs)" if names else platform.machine()


def results_of(source: str, chosen: list[Row], options) -> list[dict]:
    """The rows of one graph; those of a framework that cannot be imported are left out."""
    case, results, missing = load(source, options.scale, options.width), [], set()
    for row in chosen:
        if row.framework in missing:
            continue
        print(f"{case.name}: {row.key} ...", file=sys.stderr)
        try:
            result = measure(row, case, options.repeat)
        except ImportError as error:
            print(f"  rows of {row.framework} are left out: {error}", file=sys.stderr)
            missing.add(row.framework)
            continue
        if row.attention and not options.no_memory:
            alone, ours = (memory_in_child(row, side, source, options) for side in (0, 1))
            if alone is not None and ours is not None:
                result |= {
                    "alone_extra_mib": alone,
                    "gnnaccel_extra_mib": ours,
                    "less_memory": alone / max(ours, 0.1),
                }
        results.append(result)
    return results


def save(path: str, results: list[dict]) -> None:
    """Write the figures of `measure` to a CSV file."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(results)


def _arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", nargs="+", default=["power-law"], metavar="NAME", help="power-law, PATH.npz")
    parser.add_argument("--rows", nargs="+", default=[], metavar="TEXT", help="only rows with one of these in the name")
    parser.add_argument("--repeat", type=int, default=11, help="timed runs of each side (default 11)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="features, a multiple of four")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the power-law graph, for a quick look")
    parser.add_argument("--no-memory", action="store_true", help="leave out the memory of attention rows")
    parser.add_argument("--csv", metavar="OUT", help="also write the figures there")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    counts_are_good = options.width >= 4 and options.width % 4 == 0 and min(options.repeat, options.threads) >= 1
    if not counts_are_good or not 0 < options.scale <= 1:
        parser.error("expected --width a multiple of four, --repeat and --threads at least 1, --scale in (0, 1]")
    return options


def main(argv=None) -> int:
    options = _arguments(argv)
    warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks)")
    torch.set_num_threads(options.threads)
    if options.memory_of:
        key, side = options.memory_of
        print(json.dumps(memory_of(key, int(side), load(options.graph[0], options.scale, options.width))))
        return 0
    wanted = [text.lower() for text in options.rows]
    chosen = [r for r in rows(options.width) if not wanted or any(text in r.key.lower() for text in wanted)]
    if not chosen:
        print("no row matches; the rows are:", *(r.key for r in rows(options.width)), sep="\n  ", file=sys.stderr)
        return 2
    results: list[dict] = []
    for source in options.graph:
        results += results_of(source, chosen, options)
    if not results:
        return 1
    print(f"{versions()}\n\n{markdown(results)}")
    if options.csv:
        save(options.csv, results)
    return 0 if all(r["error"] <= TOLERANCE for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
