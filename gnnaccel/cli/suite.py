"""`gnnaccel compare --suite`: several models, graphs and frameworks in one go, one report of all.

What is measured becomes one plain dictionary, that of results.json; tables, charts and the report are made of it.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from gnnaccel import __version__, data
from gnnaccel.cli import baseline, charts, compare, datasets, doctor, html, output
from gnnaccel.cli.children import Failed
from gnnaccel.cli.compare import Comparison
from gnnaccel.cli.request import NAMES, Request, check_installed, check_options

FORMAT = 1  # of results.json
# Figures of a side that have a column in results.csv.
COLUMNS = (
    "epoch_time_median", "epoch_time_q1", "epoch_time_q3", "first_epoch_surplus", "compile_time", "capture_time",
    "peak_memory", "test_accuracy", "final_loss", "max_loss_difference", "share_accelerated", "calls_left",
)  # fmt: skip
_OF_A_CASE = ("framework", "model", "dataset", "device")


def run(requests: Sequence[Request], out: Path, earlier: Path | None = None) -> int:
    """Compare for each request, print and save one report of all: the exit code.

    Parameters
    ----------
    requests : sequence of Request
        At least one; all for the same device.
    out : Path
        Folder that gets a new folder.
    earlier : Path, optional
        results.json of an earlier suite, to compare with.
    """
    try:
        old = baseline.read(earlier) if earlier else None
        graphs = _check(requests)
        with compare.new_folder(out) as folder:
            hidden = folder("")
            cases, interrupted = _cases(requests, graphs, hidden)
            if not cases:
                raise KeyboardInterrupt
            suite = describe(cases, interrupted)
            changes = baseline.compare(old, suite) if old else None
            _save(suite, changes, hidden)
            where = folder(f"suite-{requests[0].device}-{time.strftime('%Y%m%d-%H%M%S')}")
    except Failed as error:
        print(f"gnnaccel compare: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("gnnaccel compare: interrupted before the first comparison was done; nothing was saved", file=sys.stderr)
        return 130
    show(suite, changes)
    print(f"saved in {where}: {', '.join(sorted(path.name for path in where.iterdir() if path.is_file()))}")
    print("and each comparison in a folder of its own there")
    if interrupted:
        print("gnnaccel compare: interrupted; what was done by then was saved", file=sys.stderr)
        return 130
    return int(any(case["error"] for case in suite["cases"]))


def _check(requests: Sequence[Request]) -> dict[str, data.Dataset]:
    """Refuse what cannot work before anything is trained: the graphs, by name, the same ones for both frameworks."""
    for request in requests:
        check_options(request)
    for framework in dict.fromkeys(request.framework for request in requests):
        check_installed(next(request for request in requests if request.framework == framework))
    graphs: dict[str, data.Dataset] = {}
    with tempfile.TemporaryDirectory(prefix="gnnaccel-") as work:
        for request in requests:
            if request.dataset not in graphs:
                graphs[request.dataset] = datasets.load(request.dataset, request.framework, Path(work))
    taken: dict[str, str] = {}
    for asked, graph in graphs.items():
        if taken.setdefault(graph.name, asked) != asked:
            raise Failed(f"--dataset: {taken[graph.name]!r} and {asked!r} are both called {graph.name}; rename one", 2)
    return graphs


def _cases(
    requests: Sequence[Request], graphs: dict[str, data.Dataset], folder: Path
) -> tuple[list[tuple[Request, Comparison | Failed]], bool]:
    """What came of each request, saved in a folder of its own as soon as it is there; and whether it was cut short."""
    cases: list[tuple[Request, Comparison | Failed]] = []
    try:
        for nth, request in enumerate(requests, start=1):
            graph = graphs[request.dataset]
            name = f"{request.framework}-{request.model}-{graph.name}"
            print(f"[{nth}/{len(requests)}] {name}", file=sys.stderr, flush=True)
            try:
                with tempfile.TemporaryDirectory(prefix="gnnaccel-") as work:
                    done = compare.measure(request, Path(work), graph)
                (folder / name).mkdir()
                compare.save(done, folder / name)
                cases.append((request, done))
            except Failed as error:
                print(f"gnnaccel compare: {name}: {error}", file=sys.stderr, flush=True)
                cases.append((request, error))
            except Exception as error:  # a full disk, a mistake of ours: what the others measured is kept
                traceback.print_exc()
                cases.append((request, Failed(f"{type(error).__name__}: {error}")))
    except KeyboardInterrupt:
        return cases, True
    return cases, False


def _case(request: Request, done: Comparison | Failed) -> dict[str, Any]:
    """One comparison in results.json."""
    case: dict[str, Any] = {
        "framework": request.framework,
        "model": request.model,
        "dataset": {"name": Path(request.dataset).stem},
        "device": request.device,
        "options": {key: getattr(request, key) for key in (*baseline.OPTIONS, *baseline.OF_BATCHES)},
    }
    if isinstance(done, Failed):
        return case | {"error": str(done)}
    results = done.results
    figures = {
        side: {figure.key: figure[side] for figure in results.figures if side in figure.values}
        for side in results.sides
    }
    return case | {
        "error": "",
        "dataset": done.circumstances["dataset"],
        "title": done.title,
        "names": done.names,
        "warmup_epochs": results.warmup,
        "sides": figures,
        "speedup": dict(results["epoch_time_median"].ratios),
        "memory_ratio": dict(results["peak_memory"].ratios),
        "left": [left._asdict() for left in results.left],
        "warnings": list(results.warnings),
        "notes": done.notes,
        "runs": [
            {"side": run.side, "pair": run.pair + 1, **{key: run.measured[key] for key in ("epoch_time_ms", "loss")}}
            for run in done.runs
        ],
    }


def describe(cases: Sequence[tuple[Request, Comparison | Failed]], interrupted: bool = False) -> dict[str, Any]:
    """What results.json has: where the figures come from, and every comparison."""
    done = [case for _, case in cases if isinstance(case, Comparison)]
    versions: dict[str, str] = {"gnnaccel": __version__, "python": sys.version.split()[0]}
    for case in done:
        versions |= case.circumstances["versions"]
    first = done[0].circumstances if done else {}
    return {
        "format": FORMAT,
        "command": shlex.join(["gnnaccel", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "interrupted": interrupted,
        "versions": versions,
        "cpu": doctor.cpu_name(),
        "cores": doctor.cores(),
        "gpu": first.get("gpu"),
        "threads": first.get("threads"),
        "options": {**dataclasses.asdict(cases[0][0]), "out": str(cases[0][0].out)},
        "cases": [_case(request, case) for request, case in cases],
    }


def label(case: dict[str, Any]) -> str:
    """A comparison in a few words."""
    return f"{NAMES[case['framework']]} {case['model']} on {case['dataset']['name']}"


def _save(suite: dict[str, Any], changes: baseline.Changes | None, folder: Path) -> None:
    text = json.dumps(_finite(suite), indent=1, allow_nan=False)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    save_csv(folder / "results.csv", suite)
    if any(not case["error"] for case in suite["cases"]):
        charts.save_overview(folder / "overview.png", suite)
    (folder / "report.html").write_text(html.render(suite, changes), encoding="utf-8")


def _finite(value: Any) -> Any:
    """The same with None for numbers that are not finite, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_csv(path: Path, suite: dict[str, Any]) -> None:
    """A row for each side of each comparison; one for a comparison that failed."""
    columns = (*_OF_A_CASE, "nodes", "edges", "side", "speedup", "memory_ratio", *COLUMNS, "warnings", "error")
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for case in suite["cases"]:
            graph = case["dataset"]
            common = {key: case[key] for key in _OF_A_CASE} | {"dataset": graph["name"]}
            common |= {"nodes": graph.get("num_nodes", ""), "edges": graph.get("num_edges", "")}
            if case["error"]:
                writer.writerow(common | {"error": case["error"].splitlines()[0]})
                continue
            for side, figures in case["sides"].items():
                row = {key: figures.get(key) for key in COLUMNS}
                row |= {key: case[key].get(side) for key in ("speedup", "memory_ratio")}
                writer.writerow(common | row | {"side": side, "warnings": "; ".join(case["warnings"])})


def show(suite: dict[str, Any], changes: baseline.Changes | None) -> None:
    """Print one table of all comparisons, what went wrong, and what changed since the earlier report."""
    out = output.console()
    frame = box.ROUNDED if sys.stdout.isatty() else box.ASCII
    table = Table(title=f"epoch time in ms, median; {charts.where(suite)}", title_justify="left", box=frame)
    sides = list(dict.fromkeys(side for case in suite["cases"] for side in case.get("sides", ())))
    table.add_column("")
    for name in [*(side.replace("_", ", ") for side in sides), "less memory", "loss gap", "accelerated"]:
        table.add_column(name, justify="right")
    for case in suite["cases"]:
        if case["error"]:
            table.add_row(label(case), "failed", style="bold red")
        else:
            table.add_row(label(case), *(_cell(case, side) for side in sides), *_of_gnnaccel(case))
    out.print(table)
    for line, labels in _warned(suite).items():
        of = "all" if 1 < len(labels) == len(suite["cases"]) else ", ".join(labels)
        out.print(f"WARNING: {of}: {line}", soft_wrap=True)
    for note in dict.fromkeys(note for case in suite["cases"] for note in case.get("notes", ())):
        if not note.startswith("speedup of each"):
            out.print(f"note: {note}", soft_wrap=True)
    for line in changes.lines() if changes else ():
        out.print(line, soft_wrap=True)


def _warned(suite: dict[str, Any]) -> dict[str, list[str]]:
    """Warnings and errors, each once, with the comparisons that have it."""
    found: dict[str, list[str]] = {}
    for case in suite["cases"]:
        for line in [*case.get("warnings", ()), *filter(None, [case["error"].partition("\n")[0]])]:
            found.setdefault(line, []).append(label(case))
    return found


def _cell(case: dict[str, Any], side: str) -> str:
    ratio = case["speedup"].get(side)
    return output.number(case["sides"].get(side, {}).get("epoch_time_median"), "ms") + (
        f" ({ratio:.2f}x)" if ratio else ""
    )


def _of_gnnaccel(case: dict[str, Any]) -> tuple[str, str, str]:
    figures, memory = case["sides"]["gnnaccel"], case["memory_ratio"].get("gnnaccel")
    share = figures["share_accelerated"]
    return (
        f"{memory:.1f}x" if memory else "",
        output.number(figures["max_loss_difference"]),
        "" if share is None else f"{share:.0%}",
    )


def requests_of(
    frameworks: Sequence[str], models: Sequence[str], names: Sequence[str], **options: Any
) -> list[Request]:
    """Every framework with every model on every graph; graphs outermost, so that what belongs together stands so."""
    return [
        Request(framework=framework, model=model, dataset=name, **options)
        for name in names
        for model in models
        for framework in frameworks
    ]
