"""`gnnaccel compare`: one training program, run by the framework alone and with gnnaccel, side by side."""

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
from importlib import util
from pathlib import Path

from gnnaccel import __version__
from gnnaccel.cli import children, datasets, doctor, output
from gnnaccel.cli.children import Failed
from gnnaccel.cli.results import SIDES, Results, Run, evaluate

_PACKAGES = {"dgl": "dgl", "pyg": "torch_geometric"}
_NAMES = {"dgl": "DGL", "pyg": "PyG"}
_TRAINER = Path(__file__).parent / "train" / "trainer.py"
_TRAINED = ("framework", "model", "device", "threads", "epochs", "seed", "hidden", "heads", "layers", "lr", "dropout")


@dataclasses.dataclass(frozen=True)
class Request:
    """What `compare` was asked for; the fields are its options."""

    framework: str
    model: str
    dataset: str
    epochs: int
    device: str
    threads: int
    seed: int
    hidden: int
    heads: int
    layers: int
    lr: float
    dropout: float
    repeats: int
    tolerance: float
    maxk: int
    out: Path


def run(request: Request) -> int:
    """Do the whole comparison, print it, and save it in a new folder: the exit code."""
    try:
        _check(request)
        with _new_folder(request.out) as folder, tempfile.TemporaryDirectory(prefix="gnnaccel-") as work:
            where = _compare(request, folder, Path(work))
    except Failed as error:
        print(f"gnnaccel compare: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("gnnaccel compare: interrupted; nothing was saved", file=sys.stderr)
        return 130
    print(f"saved in {where}: {', '.join(sorted(os.listdir(where)))}")
    return 0


def _check(request: Request) -> None:
    """Refuse what cannot work before anything is trained.

    Raises
    ------
    Failed
    """
    if request.maxk and request.model not in ("gcn", "sage", "gin"):
        raise Failed(
            f"--maxk: {request.model} has no ReLU in front of a plain sum; use it with gcn, sage or gin", code=2
        )
    if request.maxk >= request.hidden:
        raise Failed(f"--maxk: expected less than --hidden, {request.hidden}, got {request.maxk}", code=2)
    package = _PACKAGES[request.framework]
    if util.find_spec(package) is None:
        raise Failed(f"{_NAMES[request.framework]} is not installed: pip install {package}=={doctor.RUN_WITH[package]}")
    if request.device == "cpu":
        return
    torch = children.ask("torch")
    if "error" in torch or "binary_error" in torch:
        raise Failed(torch.get("error") or torch["binary_error"])
    if not torch["gpus"]:
        why = "this torch was built without CUDA" if torch["cuda"] is None else "torch sees no GPU"
        raise Failed(f"--device cuda: {why} (torch {torch['version']}); use --device cpu")
    if not torch["cuda_kernels"]:
        raise Failed(
            "--device cuda: this gnnaccel was built without its CUDA half; install nvcc (CUDA 12 or later) and "
            "reinstall it with GNNACCEL_CUDA=ON, or use --device cpu"
        )


@functools.cache
def _bridged(request: Request) -> bool:
    """True if DGL runs on CUDA through gnnaccel's bridge alone."""
    on_cuda = request.framework == "dgl" and request.device != "cpu"
    return on_cuda and not children.ask("dgl_cuda").get("has_cuda", True)


def _side(request: Request, side: str) -> str:
    """What runs on a side, in words."""
    name = _NAMES[request.framework]
    if side == "gnnaccel":
        return f"{name} with gnnaccel"
    return f"{name} on torch's kernels" if _bridged(request) else f"{name} alone"


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Callable[[str], Path]]:
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


def _compare(request: Request, folder: Callable[[str], Path], work: Path) -> Path:
    graph = datasets.load(request.dataset, request.framework, work)
    data = work / "graph-to-train.npz"
    datasets.save(graph, data)
    runs, said = _train(request, data, work)
    prepared = children.ask(
        "prepare", request.framework, str(data), request.model, request.device, str(request.threads), timeout=600
    )
    results = evaluate(runs, prepared.get("time_ms"), math.inf if request.maxk else request.tolerance)
    alone = _side(request, "alone")
    threads = runs[0].measured["threads"]
    title = f"{_NAMES[request.framework]} {request.model} on {graph.name}: {request.epochs} epochs, "
    title += f"{request.device}, {threads} thread{'s' if threads != 1 else ''}"
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
    output.show(results, title, alone, notes)

    hidden = folder("")
    output.save_results(hidden / "results.csv", results)
    output.save_epochs(hidden / "epochs.csv", runs, results.warmup)
    output.save_chart(hidden / "curves.png", runs, results, title, alone)
    (hidden / "run.json").write_text(json.dumps(_circumstances(request, graph, runs, results, notes), indent=1) + "\n")
    return folder(f"{request.framework}-{request.model}-{graph.name}-{request.device}-{time.strftime('%Y%m%d-%H%M%S')}")


def _train(request: Request, data: Path, work: Path) -> tuple[list[Run], list[str]]:
    """All runs, the sides taking turns so that a machine that drifts does it to both; and what gnnaccel warned of."""
    runs: list[Run] = []
    said: dict[str, None] = {}
    with _progress(request) as (begin, on_line):
        for pair in range(request.repeats):
            for side in SIDES if pair % 2 == 0 else reversed(SIDES):
                begin(pair, side)
                run, complaints = _train_once(request, data, work, pair, side, on_line)
                runs.append(run)
                if side == "gnnaccel":
                    said.update(dict.fromkeys(line for line in complaints.splitlines() if line.startswith("gnnaccel")))
    return runs, list(said)


def _train_once(
    request: Request, data: Path, work: Path, pair: int, side: str, on_line: Callable[[str], None]
) -> tuple[Run, str]:
    result, profile = work / f"{side}-{pair}.json", work / f"profile-{side}-{pair}.json"
    if side == "gnnaccel":
        start, env = children.command("on", profile)
    else:  # DGL's wheel cannot be imported beside a current torch without the shim
        mode = "off" if request.framework != "dgl" else "bridge" if _bridged(request) else "compat"
        start, env = children.command(mode)
    if request.threads:
        env |= {"OMP_NUM_THREADS": str(request.threads), "MKL_NUM_THREADS": str(request.threads)}
    options = [f"--{name}={getattr(request, name)}" for name in _TRAINED]
    if request.maxk and side == "gnnaccel":
        options.append(f"--maxk={request.maxk}")
    words = [*start, str(_TRAINER), *options, f"--data={data}", f"--result={result}"]
    what = f"the run of {_side(request, side)}"
    _, complaints = children.run(words, env, what, on_line)
    try:
        measured = json.loads(result.read_text(encoding="utf-8"))
        counters = json.loads(profile.read_text(encoding="utf-8")) if side == "gnnaccel" else {}
    except (OSError, ValueError) as error:
        raise Failed(f"{what} left no result: {error}\n\n{complaints.strip()}") from None
    return Run(side, pair, measured, counters), complaints


@contextlib.contextmanager
def _progress(request: Request) -> Iterator[tuple[Callable[[int, str], None], Callable[[str], None]]]:
    """Functions to call at the start of a run and with each line it prints: a bar, or a line per run in a pipe."""

    def describe(pair: int, side: str) -> str:
        return f"pair {pair + 1} of {request.repeats}: {_side(request, side)}"

    if not sys.stdout.isatty():
        yield lambda pair, side: print(describe(pair, side), file=sys.stderr, flush=True), lambda line: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=output.console(), transient=True) as progress:
        task = progress.add_task("", total=2 * request.repeats * request.epochs, loss="")

        def on_line(line: str) -> None:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # frameworks print things of their own
                progress.update(task, advance=1, loss=f"loss {json.loads(line)['loss']:.4f}")

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
    if len(results.pair_speedups) > 1:
        notes.append("speedup of each pair: " + ", ".join(f"{speedup:.2f}x" for speedup in results.pair_speedups))
    if runs[0].measured["extra_memory_bytes"] is None:
        notes.append("peak memory: this system does not let a process reset the peak of its resident memory")
    if runs[0].measured["test_accuracy"] is None:
        notes.append("test accuracy: the graph has no test nodes")
    if results["max_loss_difference"].alone is not None:
        notes.append("largest loss difference: under alone, that of runs of the framework alone among themselves")
    return notes


def _circumstances(request: Request, graph, runs: list[Run], results: Results, notes: list[str]) -> dict:
    """Where the figures come from: command, versions, devices, settings, counters."""
    measured = runs[0].measured
    first = next(run for run in runs if run.side == "gnnaccel")
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
            _PACKAGES[request.framework]: measured["framework_version"],
        },
        "cpu": doctor.cpu_name(),
        "cores": doctor.cores(),
        "gpu": measured["device_name"] or None,
        "threads": measured["threads"],
        "started_by": "flag" if children.switch_is_installed() else "python -m gnnaccel",
        "order": [f"{run.pair + 1} {run.side}" for run in runs],
        "warmup_epochs": results.warmup,
        "pair_speedups": list(results.pair_speedups),
        "warnings": list(results.warnings),
        "notes": notes,
        "calls": first.profile.get("sites", {}),
    }
