"""How to install packages where this program runs: by its own pip or uv; torch's builds with and without CUDA."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyPI's torch for Linux brings gigabytes of CUDA libraries
_NEWEST_PYTHON = {"dgl": (3, 12)}  # that a framework's release has builds for


def _is_ours(program: str) -> bool:
    """True if the shell finds this environment's program by that name, and not another's."""
    found = shutil.which(program)
    return found is not None and os.path.dirname(found) == os.path.dirname(sys.executable)


def python() -> str:
    """How to start the Python of this environment."""
    return "python" if _is_ours("python") else shlex.quote(sys.executable)


def _has_pip() -> bool:
    """Not by importlib's search: while it looks for pip, setuptools takes its own distutils away."""
    return next(iter(metadata.distributions(name="pip")), None) is not None


def install(what: str, variables: str = "") -> str:
    """The command that installs `what` into this environment: a venv, conda's or uv's."""
    this, prefix = shlex.quote(sys.executable), shlex.quote(sys.prefix)
    first, words = "", f"{this} -m pip install"
    if _has_pip():
        if _is_ours("pip"):
            words = "pip install"
    elif shutil.which("uv"):
        words = "uv pip install" + ("" if os.environ.get("VIRTUAL_ENV") == sys.prefix else f" --python {this}")
    elif Path(sys.prefix, "conda-meta").is_dir():
        first = f"conda install -y -p {prefix} pip && "
    else:
        first = f"{this} -m ensurepip && "
    return f"{first}{variables}{words} {what}"


def has_build(name: str) -> bool:
    """Whether the release of a framework that gnnaccel is run with has a build for this Python."""
    return sys.version_info[:2] <= _NEWEST_PYTHON.get(name, sys.version_info[:2])


def framework(name: str, version: str) -> str:
    """The command that installs a framework, or why there is none."""
    if not has_build(name):
        newest = ".".join(map(str, _NEWEST_PYTHON[name]))
        return f"{name} {version} has no build for this Python, {newest} is the last"
    return install(f"{name}=={version}")


def torch(version: str, gpu: bool, instead: bool = False) -> str:
    """The command that installs a release of torch: the build with CUDA where there is a GPU.

    instead : the same release is there as another build, which pip would take for the one that is asked for.
    """
    options = "--force-reinstall " if instead else ""
    return install(f"{options}torch=={version}" + ("" if gpu else f" --index-url {CPU_INDEX}"))


def clone() -> Path | None:
    """The folder of sources that gnnaccel is imported from, if it is one."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "setup.py").is_file() and (root / "CMakeLists.txt").is_file() else None


def gnnaccel(gpu: bool) -> str:
    """The command that builds and installs gnnaccel, with its CUDA half or without."""
    has_nvcc, root = shutil.which("nvcc") is not None, clone()
    variables = "GNNACCEL_CUDA=ON " if gpu else "GNNACCEL_CUDA=OFF " if has_nvcc else ""
    notes = [] if root else ["in a clone of gnnaccel"]
    notes += ["with nvcc (CUDA 12 or later) on the path"] if gpu and not has_nvcc else []
    command = install(f"-e {shlex.quote(str(root))}" if root else ".", variables)
    return command + (f"    # {', '.join(notes)}" if notes else "")
