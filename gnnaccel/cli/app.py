"""Commands and their options. What a command does is in a module of its own, imported when it runs."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

# Plain messages: boxes would break the lists of allowed values into lines.
app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
_program: list[list[str]] = []  # what `run` was asked for


FRAMEWORKS = ("dgl", "pyg")
MODELS = ("gcn", "sage", "gin", "gat", "agnn")
# What --suite compares where nothing is said.
_SUITE = {"--model": ("gcn", "sage", "gin", "gat"), "--dataset": ("cora", "pubmed")}


class Device(str, enum.Enum):
    cpu = "cpu"
    cuda = "cuda"


def execute(arguments: list[str]) -> tuple[int, list[str] | None]:
    """The exit code and, for `run`, the arguments for `gnnaccel.__main__.main`."""
    _program.clear()
    excepthook = sys.excepthook
    try:
        app(arguments, prog_name="gnnaccel")
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
        return code, _program[0] if _program and not code else None
    finally:
        sys.excepthook = excepthook  # typer leaves its own behind
    return 0, None


def _version(wanted: bool) -> None:
    if wanted:
        from gnnaccel import __version__

        print(f"gnnaccel {__version__}")
        raise typer.Exit


@app.callback()
def _gnnaccel(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Run DGL and PyTorch Geometric programs on gnnaccel's kernels, and see what that gives."""


@app.command(options_metavar="[OPTIONS]", context_settings={"allow_interspersed_args": False})
def run(
    program: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads it at run time, also on Python 3.10)
        typer.Argument(metavar="PROGRAM", help="script.py or -m module, and its arguments, which it gets untouched."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Log what is accelerated, what not, and why.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Print a table of calls by kind at exit.")] = False,
    profile_json: Annotated[str, typer.Option(metavar="FILE", help="Write that table as JSON instead.")] = "",
    compat: Annotated[bool, typer.Option("--compat", help="Accelerate nothing, only make DGL importable.")] = False,
) -> None:
    """Run a program accelerated, unmodified: the same as GNNACCEL=1 python script.py."""
    if not program:
        raise typer.BadParameter("expected script.py, or -m and a module")
    switches = (("-v", verbose), ("--profile", profile), ("--compat", compat))
    options = [name for name, given in switches if given]
    if profile_json:
        options.append(f"--profile-json={profile_json}")
    _program.append([*options, *program])


@app.command()
def doctor(
    file: Annotated[Optional[Path], typer.Argument(help="Of --report: where it goes, else it is printed.")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="JSON to show to others: no user or host names, no paths under a home.")
    ] = False,
) -> None:
    """Say what is installed, what will be fast, what will not and why, and what to do next. Exit code 1: nothing is."""
    from gnnaccel.cli import anonymous, doctor

    if file is not None and (not report or not file.absolute().parent.is_dir() or file.is_dir()):
        raise typer.BadParameter(
            f"expected --report and a file in a folder that is there, got {str(file)!r}", None, None, "FILE"
        )
    raise typer.Exit(anonymous.write(file) if report else doctor.show(as_json))


@app.command()
def inspect(
    dataset: Annotated[
        str, typer.Argument(help="cora, citeseer, pubmed, or a file: .npz, .mtx, a list of edges.")
    ] = "cora",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    png: Annotated[Optional[Path], typer.Option(help="Draw degrees, edges and blocks into this file.")] = None,  # noqa: UP045
) -> None:
    """Say what a graph is like for the kernels: degrees, neighbours that rows share, tiles for tensor cores."""
    from gnnaccel.cli import inspect

    raise typer.Exit(inspect.show(dataset, as_json, png))


class Method(str, enum.Enum):
    communities = "communities"
    metis = "metis"
    range = "range"


class Model(str, enum.Enum):
    gcn = "gcn"
    sage = "sage"
    gin = "gin"
    gat = "gat"


class Speed(str, enum.Enum):
    h100 = "h100"
    here = "here"


@app.command()
def partition(
    context: typer.Context,
    graph: Annotated[
        str, typer.Argument(help="cora, citeseer, pubmed, generated, or a file: .npz, .mtx, a list of edges.")
    ],
    out: Annotated[Optional[Path], typer.Option(metavar="FOLDER", help="A new or empty folder for the parts.")] = None,  # noqa: UP045
    parts: Annotated[int, typer.Option(min=1, help="Ranks that will train.")] = 1,
    method: Annotated[Method, typer.Option(help="How nodes are put together.")] = Method.communities,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Write nothing; say what training would take on so many GPUs.")
    ] = False,
    gpus: Annotated[str, typer.Option(help="Of --estimate: how many, between commas.")] = "1,2,4,8,16,32,64",
    model: Annotated[Model, typer.Option(help="Of --estimate: whose layers train.")] = Model.gcn,
    hidden: Annotated[int, typer.Option(min=1, help="Of --estimate: width of hidden layers, all heads.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Of --estimate: convolutions.")] = 3,
    heads: Annotated[int, typer.Option(min=1, help="Of --estimate: heads of gat.")] = 4,
    feats: Annotated[int, typer.Option(min=0, help="Of --estimate: features of nodes; 0: the file's, or 128.")] = 0,
    classes: Annotated[int, typer.Option(min=0, help="Of --estimate: of labels; 0: the file's, or 40.")] = 0,
    memory_gib: Annotated[float, typer.Option(help="Of --estimate: memory of a GPU.")] = 80.0,
    link_gbs: Annotated[float, typer.Option(help="Of --estimate: GB/s that a GPU sends and receives.")] = 50.0,
    latency_us: Annotated[float, typer.Option(help="Of --estimate: of an exchange, beyond its bytes.")] = 30.0,
    speed: Annotated[
        Speed, typer.Option(help="Of --estimate: rates of kernels, as committed results have them or measured now.")
    ] = Speed.h100,
    nodes: Annotated[int, typer.Option(min=0, help="Of --estimate: of a larger graph that this one is like.")] = 0,
    edges: Annotated[int, typer.Option(min=0, help="Of --estimate: edges of that.")] = 0,
) -> None:
    """Cut a graph and its features, labels and masks into parts for training on several GPUs (docs/distributed.md).

    --estimate: say beforehand what an epoch and a GPU's memory would be.
    """
    given = {name for name in context.params if context.get_parameter_source(name).name != "DEFAULT"}  # type: ignore[union-attr]
    writing, shared = {"out", "parts"}, {"graph", "method", "as_json"}
    missing = set() if estimate else writing - given
    foreign = given & writing if estimate else given - writing - shared
    for name in sorted(missing):
        raise typer.BadParameter("missing (or --estimate, which writes nothing)", None, None, f"--{name}")
    for name in sorted(foreign):
        told = "writes parts, which --estimate does not" if estimate else "applies to --estimate alone"
        raise typer.BadParameter(told, None, None, f"--{name.replace('_', '-')}")
    if not estimate:
        from gnnaccel.cli import partition

        assert out is not None
        raise typer.Exit(partition.run(graph, parts, out, method.value, as_json))
    counts = _several("--gpus", gpus)
    if not all(count.isdecimal() and int(count) for count in counts):
        raise typer.BadParameter(f"expected numbers from 1 between commas, got {gpus!r}", None, None, "--gpus")
    if bool(nodes) != bool(edges):
        raise typer.BadParameter("expected both or neither", None, None, "--nodes and --edges")
    from gnnaccel.cli import outlook_parts

    options = dict(
        model=model.value,
        hidden=hidden,
        layers=layers,
        heads=heads,
        memory_gib=memory_gib,
        link_gbs=link_gbs,
        latency_us=latency_us,
        speed=speed.value,
        method=method.value,
        stands_for=(nodes, edges) if nodes else None,
    )
    raise typer.Exit(outlook_parts.run(graph, [int(count) for count in counts], feats, classes, as_json, options))


@app.command()
def compare(
    framework: Annotated[str, typer.Option(help="Whose layers are trained: dgl, pyg, or both: dgl,pyg.")] = "",
    model: Annotated[
        str, typer.Option(help="Of the framework's own layers: gcn, sage, gin, gat, agnn; or several: gcn,gat.")
    ] = "",
    dataset: Annotated[
        str,
        typer.Option(
            help="cora, citeseer, pubmed, generated, a path.npz, a name of the framework's loaders; or several."
        ),
    ] = "",
    suite: Annotated[
        bool, typer.Option("--suite", help="One report of all that is named; also where several are named.")
    ] = False,
    baseline: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="results.json of an earlier suite: say what got slower since."),
    ] = None,
    sample: Annotated[
        str, typer.Option(help="Train on sampled batches, with so many neighbours a layer: 15,10,5; -1: all.")
    ] = "",
    batch_size: Annotated[int, typer.Option(min=1, help="Of --sample: training nodes of a batch.")] = 1024,
    epochs: Annotated[
        int, typer.Option(min=1, help="Per run: training steps on the whole graph, or passes over all batches.")
    ] = 50,
    device: Annotated[Device, typer.Option(help="Where both sides train.")] = Device.cpu,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: as many as torch takes.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of weights and dropout, for both sides.")] = 0,
    hidden: Annotated[int, typer.Option(min=1, help="Width of hidden layers; of each head for gat.")] = 16,
    heads: Annotated[int, typer.Option(min=1, help="Heads of gat.")] = 4,
    layers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Convolutions; if not given 2, or as many as --sample has numbers."),
    ] = None,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of Adam.")] = 0.01,
    dropout: Annotated[float, typer.Option(min=0.0, max=1.0, help="Between layers.")] = 0.5,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of runs, one alone and one with gnnaccel.")] = 2,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Losses further apart than this are a warning.")] = 1e-4,
    maxk: Annotated[
        int, typer.Option(min=0, help="gnnaccel's side trains ANOTHER MODEL: MaxK with this k for ReLU. 0: the same.")
    ] = 0,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Also both sides under torch.compile; its time is shown apart.")
    ] = False,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="Also gnnaccel.captured around the training step; on CUDA alone.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder that gets a new folder with the results.")] = Path("runs"),
) -> None:
    """Train the framework alone and with gnnaccel, from the same seed, and compare the two."""
    from gnnaccel import versions
    from gnnaccel.cli import compare, installing
    from gnnaccel.cli import suite as suites
    from gnnaccel.cli.request import installed

    frameworks = _several("--framework", framework, FRAMEWORKS)
    models = _several("--model", model, MODELS)
    datasets = [dataset] if dataset.endswith(".npz") and Path(dataset).is_file() else _several("--dataset", dataset)
    suite = suite or baseline is not None or max(len(frameworks), len(models), len(datasets)) > 1
    if not frameworks:
        if not suite:
            raise typer.BadParameter(
                "expected dgl or pyg (or --suite, which takes those installed)", None, None, "--framework"
            )
        frameworks = installed()
        if not frameworks:
            command = installing.framework("torch_geometric", versions.PINNED["torch_geometric"])
            print(f"gnnaccel compare: neither DGL nor PyG is installed: {command}", file=sys.stderr)
            raise typer.Exit(1)
    fanouts = _fanouts(sample)
    options = dict(
        sample=fanouts,
        batch_size=batch_size,
        epochs=epochs,
        device=device.value,
        threads=threads,
        seed=seed,
        hidden=hidden,
        heads=heads,
        layers=layers or len(fanouts) or 2,
        lr=lr,
        dropout=dropout,
        repeats=repeats,
        tolerance=tolerance,
        maxk=maxk,
        out=out,
        compile=compiled,
        cuda_graphs=cuda_graphs,
    )
    if suite:
        models, datasets = models or _SUITE["--model"], datasets or _SUITE["--dataset"]
        requests = suites.requests_of(frameworks, models, datasets, **options)
        raise typer.Exit(suites.run(requests, out, baseline))
    (request,) = suites.requests_of(frameworks, models or MODELS[:1], datasets or ("cora",), **options)
    raise typer.Exit(compare.run(request))


def _fanouts(text: str) -> tuple[int, ...]:
    """The numbers of --sample."""
    try:
        numbers = tuple(int(word) for word in text.split(",")) if text else ()
    except ValueError:
        numbers = (0,)
    if not all(number > 0 or number == -1 for number in numbers):
        raise typer.BadParameter(
            f"expected numbers from 1, or -1 for all, between commas, got {text!r}", None, None, "--sample"
        )
    return numbers


def _several(option: str, text: str, allowed: Sequence[str] = ()) -> Sequence[str]:
    """The values between the commas, each once; none for an empty text."""
    values = list(dict.fromkeys(value.strip() for value in text.split(","))) if text else []
    for value in values:
        if not value or (allowed and value not in allowed):
            expected = ", ".join(allowed) if allowed else "names between the commas"
            where = "" if value == text else f" in {text!r}"
            raise typer.BadParameter(f"{value!r}{where}: expected {expected}", None, None, option)
    return values
