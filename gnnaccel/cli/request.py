"""What `gnnaccel compare` was asked for, and whether it can be done here."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
from importlib import util
from pathlib import Path

from gnnaccel import versions
from gnnaccel.cli import children, installing
from gnnaccel.cli.children import Failed
from gnnaccel.cli.results import SIDES, is_captured, is_compiled

PACKAGES = {"dgl": "dgl", "pyg": "torch_geometric"}
NAMES = {"dgl": "DGL", "pyg": "PyG"}
_SAMPLERS = ("pyg_lib", "torch_sparse")  # one of which PyG's loaders need
_CAPTURED_EPOCHS = 8  # at least: four are warm-up


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
    compile: bool = False
    cuda_graphs: bool = False
    sample: tuple[int, ...] = ()
    batch_size: int = 1024

    @property
    def sides(self) -> tuple[str, ...]:
        """What is run, in the order of the table."""
        left_out = {side for side in SIDES if is_compiled(side) and not self.compile}
        left_out |= {side for side in SIDES if is_captured(side) and not self.cuda_graphs}
        return tuple(side for side in SIDES if side not in left_out)

    @property
    def is_sampled_by_us(self) -> bool:
        """True where PyG alone could not sample: both sides draw their batches with gnnaccel's sampler then."""
        return bool(self.sample) and self.framework == "pyg" and not any(map(util.find_spec, _SAMPLERS))


def installed() -> list[str]:
    """The frameworks that are installed."""
    return [framework for framework, package in PACKAGES.items() if util.find_spec(package)]


def check_options(request: Request) -> None:
    """Refuse options that contradict each other.

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
    if request.sample and len(request.sample) != request.layers:
        raise Failed(
            f"--sample: expected a number for each of {request.layers} layers, got {len(request.sample)}", code=2
        )
    if request.sample and (request.compile or request.cuda_graphs):
        raise Failed("--sample: batches differ in size, for which nothing is compiled or captured; leave out "
                     "--compile and --cuda-graphs", code=2)  # fmt: skip
    if request.cuda_graphs and request.device == "cpu":
        raise Failed("--cuda-graphs: a step is captured on a GPU alone; add --device cuda, or leave it out", code=2)
    if request.cuda_graphs and request.epochs < _CAPTURED_EPOCHS:
        raise Failed(
            f"--cuda-graphs: expected --epochs of at least {_CAPTURED_EPOCHS} (the fourth one captures the step), "
            f"got {request.epochs}", code=2
        )  # fmt: skip


def check_installed(request: Request) -> None:
    """Refuse what cannot run here.

    Raises
    ------
    Failed
    """
    package = PACKAGES[request.framework]
    if util.find_spec(package) is None:
        command = installing.framework(package, versions.PINNED[package])
        raise Failed(f"{NAMES[request.framework]} is not installed: {command}")
    if request.compile:
        _check_compiler(request.device)
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


def _check_compiler(device: str) -> None:
    """Refuse what torch.compile would fail at after minutes of training."""
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
    if device == "cpu" and not shutil.which(compiler):
        raise Failed(
            f"--compile: torch.compile needs a C++ compiler on the CPU, and there is no {compiler}; install one, or "
            "name it in CXX"
        )
    if device == "cuda" and util.find_spec("triton") is None:
        raise Failed("--compile: torch.compile needs Triton on CUDA: " + installing.install("triton"))
