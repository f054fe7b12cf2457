"""`gnnaccel compare`: one training program, run by the framework alone and with gnnaccel, side by side.

With --compile and --cuda-graphs there are more sides: both compiled, and gnnaccel with its step captured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gnnaccel import __version__
from gnnaccel.cli import children, datasets, doctor, output
from gnnaccel.cli.children import Failed
from gnnaccel.cli.request import NAMES, PACKAGES, Request, check_installed, check_options
from gnnaccel.cli.results import Results, Run, evaluate, is_accelerated, is_captured, is_compiled
from gnnaccel.data import Dataset

_TRAINER = Path(__file__).parent / "train" / "trainer.py"
_OVER_BATCHES = 1e-2  # of losses after many steps each, in which rounding grows
_LONG = 20.0  # seconds that a run may take in a pipe before it is said what makes it shorter
_SECOND = 2  # the epoch that tells: the first builds what the others use
_TRAINED = ("framework", "model", "device", "threads", "epochs", "seed", "hidden", "heads", "layers", "lr", "dropout")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was measured: the runs, their figures and where they come from. names: of the sides."""

    request: Request
    title: str
    names: dict[str, str]
    runs: list[Run]
    results: Results
    notes: list[str]
    circumstances: dict


def run(request: Request) -> int:
    """Do the whole comparison, print it, and save it in a new folder: the exit code."""
    try:
        check_options(request)
        check_installed(request)
        with new_folder(request.out) as folder, tempfile.TemporaryDirectory(prefix="gnnaccel-") as work:
            done = measure(request, Path(work))
            output.show(done.results, done.title, done.names, done.notes)
            save(done, folder(""))
            where = folder(name_of(done))
    except Failed as error:
        print(f"gnnaccel compare: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("gnnaccel compare: interrupted; nothing was saved", file=sys.stderr)
        return 130
    print(f"saved in {where}: {', '.join(sorted(os.listdir(where)))}")
    return 0


@functools.cache
def _bridged(request: Request) -> bool:
    """True if DGL runs on CUDA through gnnaccel's bridge alone."""
    on_cuda = request.framework == "dgl" and request.device != "cpu"
    return on_cuda and not children.ask("dgl_cuda").get("has_cuda", True)


def _side(request: Request, side: str) -> str:
    """What runs on a side, in words."""
    name = NAMES[request.framework]
    alone = f"{name} on torch's kernels" if _bridged(request) else f"{name} alone"
    words = f"{name} with gnnaccel" if is_accelerated(side) else alone
    return words + (", compiled" if is_compiled(side) else ", captured" if is_captured(side) else "")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Callable[[str], Path]]:
    """A hidden folder in `out` for the results; it gets the name that the function is called with, or vanishes."""
    existed = out.is_dir()
    try:
        out.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(prefix=".compare-", dir=out))
    except OSError as error:
        raise Failed(f"--out: {str(out)!r}: {error.strerror}", code=2) from None
    named: list[Path] = []

    def name(text: str) -> Path:
        if not named:
            named.append(hidden)
            return hidden
        target = out / text
        for nth in range(2, 1000):
            if not target.exists():
                break
            target = out / f"{text}-{nth}"
        hidden.chmod(0o755)
        hidden.rename(target)
        return target

    try:
        yield name
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):  # not empty: the results are there
                out.rmdir()


def _tolerance(request: Request) -> float:
    """How far losses of the two sides may be apart without a warning."""
    if request.maxk or (request.sample and not request.is_sampled_by_us):  # another model, or other batches
        return math.inf
    return max(request.tolerance, _OVER_BATCHES) if request.sample else request.tolerance


def measure(request: Request, work: Path, graph: Dataset | None = None) -> Comparison:
    """Run all sides and evaluate them; `work` is a folder for what is needed on the way.

    graph: what to train on, where it has been loaded; default: that which the request names.

    Raises
    ------
    Failed
        If the graph cannot be had or a run fails.
    """
    graph = graph or datasets.load(request.dataset, request.framework, work)
    data = work / "graph-to-train.npz"
    datasets.save(graph, data)
    runs, said = _train(request, data, work)
    words = (request.framework, str(data), request.model, request.device, str(request.threads))
    prepared = {} if request.sample else children.ask("prepare", *words, timeout=600)
    results = evaluate(runs, prepared.get("time_ms"), _tolerance(request), request.dropout > 0)
    threads = runs[0].measured["threads"]
    title = f"{NAMES[request.framework]} {request.model} on {graph.name}: {request.epochs} epochs, "
    title += f"{request.device}, {threads} thread{'s' if threads != 1 else ''}"
    if request.sample:
        title += f", batches of {request.batch_size}, {','.join(map(str, request.sample))} neighbours"
    title += f", MaxK of {request.maxk} with gnnaccel" if request.maxk else ""
    notes = [*(f"{graph.name}: {note}" for note in graph.notes), *said]
    if "error" in prepared:
        notes.append(f"gnnaccel.prepare could not be measured: {prepared['error']}")
    if _bridged(request):
        notes.append(
            "the installed DGL was built without CUDA and cannot run this alone: beside gnnaccel stands the same "
            "bridge to CUDA on cuSPARSE (sums of copied or weighted sources, which a CUDA build of DGL leaves to it "
            "too) and on torch's gather and scatter (the rest)"
        )
    notes += _reading(results, request, runs)
    names = {side: _side(request, side) for side in request.sides}
    return Comparison(request, title, names, runs, results, notes, _circumstances(request, graph, runs, results, notes))


def save(done: Comparison, folder: Path) -> None:
    """Write the files of a comparison into an existing folder."""
    output.save_results(folder / "results.csv", done.results)
    output.save_epochs(folder / "epochs.csv", done.runs, done.results.warmup)
    output.save_chart(folder / "curves.png", done.runs, done.results, done.title, done.names)
    (folder / "run.json").write_text(json.dumps(done.circumstances, indent=1) + "\n", encoding="utf-8")


def name_of(done: Comparison) -> str:
    """A name for the folder of a comparison."""
    request, graph = done.request, done.circumstances["dataset"]["name"]
    return f"{request.framework}-{request.model}-{graph}-{request.device}-{time.strftime('%Y%m%d-%H%M%S')}"


def _train(request: Request, data: Path, work: Path) -> tuple[list[Run], list[str]]:
    """All runs, the sides taking turns so that a machine that drifts does it to both; and what gnnaccel warned of."""
    runs: list[Run] = []
    said: dict[str, None] = {}
    with _progress(request) as (begin, on_line):
        for pair in range(request.repeats):
            for side in request.sides if pair % 2 == 0 else reversed(request.sides):
                begin(pair, side)
                run, complaints = _train_once(request, data, work, pair, side, on_line)
                runs.append(run)
                if is_accelerated(side):
                    said.update(dict.fromkeys(line for line in complaints.splitlines() if line.startswith("gnnaccel")))
    return runs, list(said)


def _train_once(
    request: Request, data: Path, work: Path, pair: int, side: str, on_line: Callable[[str], None]
) -> tuple[Run, str]:
    result, profile = work / f"{side}-{pair}.json", work / f"profile-{side}-{pair}.json"
    if is_accelerated(side):
        start, env = children.command("on", profile)
    else:  # DGL's wheel cannot be imported beside a current torch without the shim
        mode = "off" if request.framework != "dgl" else "bridge" if _bridged(request) else "compat"
        start, env = children.command(mode)
    if request.threads:
        env |= {"OMP_NUM_THREADS": str(request.threads), "MKL_NUM_THREADS": str(request.threads)}
    options = [f"--{name}={getattr(request, name)}" for name in _TRAINED]
    if request.sample:
        options += [f"--sample={','.join(map(str, request.sample))}", f"--batch-size={request.batch_size}"]
    if request.is_sampled_by_us and not is_accelerated(side):
        options.append("--gnnaccel-sampler")
    if request.maxk and is_accelerated(side):
        options.append(f"--maxk={request.maxk}")
    if is_compiled(side):
        options.append("--compile")
        env |= {"TORCHINDUCTOR_CACHE_DIR": str(work / f"inductor-{side}-{pair}")}  # what an earlier run has compiled
    if is_captured(side):
        options.append("--capture")
    words = [*start, str(_TRAINER), *options, f"--data={data}", f"--result={result}"]
    what = f"the run of {_side(request, side)}"
    _, complaints = children.run(words, env, what, on_line)
    try:
        measured = json.loads(result.read_text(encoding="utf-8"))
        counters = json.loads(profile.read_text(encoding="utf-8")) if is_accelerated(side) else {}
    except (OSError, ValueError) as error:
        raise Failed(f"{what} left no result: {error}\n\n{complaints.strip()}") from None
    return Run(side, pair, measured, counters), complaints


@contextlib.contextmanager
def _progress(request: Request) -> Iterator[tuple[Callable[[int, str], None], Callable[[str], None]]]:
    """Functions to call at the start of a run and with each line it prints: a bar, or a line per run in a pipe."""

    def describe(pair: int, side: str) -> str:
        what = "pair" if len(request.sides) == 2 else "round"
        return f"{what} {pair + 1} of {request.repeats}: {_side(request, side)}"

    def of_epoch(show: Callable[[dict], None]) -> Callable[[str], None]:
        def on_line(line: str) -> None:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # frameworks print things of their own
                show(json.loads(line))

        return on_line

    if not sys.stdout.isatty():

        def hint(epoch: dict) -> None:
            if epoch["epoch"] == _SECOND and (seconds := epoch["time_ms"] / 1e3) * request.epochs > _LONG:
                words = f"{seconds:.1f} s an epoch, {request.epochs} epochs (--epochs, --repeats: fewer)"
                print(f"  {words}", file=sys.stderr, flush=True)

        yield lambda pair, side: print(describe(pair, side), file=sys.stderr, flush=True), of_epoch(hint)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    text = TextColumn("{task.fields[loss]}")
    with Progress(*columns, TimeRemainingColumn(), text, console=output.console(), transient=True) as progress:
        task = progress.add_task("", total=len(request.sides) * request.repeats * request.epochs, loss="")
        on_line = of_epoch(lambda epoch: progress.update(task, advance=1, loss=f"loss {epoch['loss']:.4f}"))
        yield lambda pair, side: progress.update(task, description=describe(pair, side), loss=""), on_line


def _reading(results: Results, request: Request, runs: list[Run]) -> list[str]:
    """What a reader of the table must know."""
    warmup = results.warmup
    which = f"first {warmup} epochs of each run are" if warmup > 1 else "first epoch of each run is"
    notes = [f"epoch time: the {which} warm-up and not counted"]
    if not warmup:
        notes = ["epoch time: the only epoch is counted, warm-up included"]
    if request.maxk:
        notes.insert(0, f"with gnnaccel another model: MaxK keeps {request.maxk} of {request.hidden} features for ReLU")
    if request.is_sampled_by_us:
        notes.append("neither pyg-lib nor torch-sparse is installed, without which PyG alone cannot sample: both sides "
                     "draw the same batches with gnnaccel's sampler, and their layers are compared")  # fmt: skip
    elif request.sample:
        notes.append("each side draws its batches with its own sampler: losses differ by that, which is no fault")
    for side, speedups in results.speedups.items() if request.repeats > 1 else ():
        of = "" if len(results.sides) == 2 else f", {_side(request, side)}"
        what = "pair" if len(results.sides) == 2 else "round"
        notes.append(f"speedup of each {what}{of}: " + ", ".join(f"{speedup:.2f}x" for speedup in speedups))
    if len(results.sides) > 2:
        notes += _reading_of_more_sides(request)
    if runs[0].measured["extra_memory_bytes"] is None:
        notes.append("peak memory: this system does not let a process reset the peak of its resident memory")
    if runs[0].measured["test_accuracy"] is None:
        notes.append("test accuracy: the graph has no test nodes")
    if results["max_loss_difference"]["alone"] is not None:
        notes.append("largest loss difference: under alone, that of runs of the framework alone among themselves")
    return notes


def _reading_of_more_sides(request: Request) -> list[str]:
    notes = ["in brackets: the framework alone (not compiled) over this side; above 1 the side is better"]
    if request.compile:
        notes.append(
            "torch.compile: what three forwards and backwards before the epochs took beyond three that are compiled, "
            "with no cache of an earlier run; the structure of the graph, which the first one makes, is in it"
        )
        notes.append("share of calls accelerated, compiled: counted while torch.compile reads the model")
    if request.cuda_graphs:
        notes.append("share of calls accelerated, captured: counted until the step is captured; replays run no Python")
    if request.dropout:
        notes.append(
            "compiled and captured, dropout draws other numbers: so do the losses differ, which is no fault; "
            "--dropout 0 compares them"
        )
    return notes


def _circumstances(request: Request, graph: Dataset, runs: list[Run], results: Results, notes: list[str]) -> dict:
    """Where the figures come from: command, versions, devices, settings, counters."""
    measured = runs[0].measured
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(run.side, run)
    return {
        "command": shlex.join(["gnnaccel", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "options": {**dataclasses.asdict(request), "out": str(request.out)},
        "dataset": {
            "name": graph.name,
            "num_nodes": graph.num_nodes,
            "num_edges": int(graph.edge_index.shape[1]),
            "num_features": int(graph.x.shape[1]),
            "num_classes": graph.num_classes,
        },
        "versions": {
            "gnnaccel": __version__,
            "python": sys.version.split()[0],
            "torch": measured["torch"],
            PACKAGES[request.framework]: measured["framework_version"],
        },
        "cpu": doctor.cpu_name(),
        "cores": doctor.cores(),
        "gpu": measured["device_name"] or None,
        "threads": measured["threads"],
        "started_by": "flag" if children.switch_is_installed() else "python -m gnnaccel",
        "order": [f"{run.pair + 1} {run.side}" for run in runs],
        "warmup_epochs": results.warmup,
        "pair_speedups": {side: list(speedups) for side, speedups in results.speedups.items()},
        "warnings": list(results.warnings),
        "notes": notes,
        "calls": {side: run.profile.get("sites", {}) for side, run in first.items() if is_accelerated(side)},
    }
