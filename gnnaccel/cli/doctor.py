"""`gnnaccel doctor`: what is installed, what will be accelerated, and what to do about the rest."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata, util

from gnnaccel import __version__, settings, switch, versions
from gnnaccel.cli import children, installing, outlook

_NAME_WIDTH = 18  # of the first column, in a pipe
_OPTIONAL = ("torch_sparse", "torch_scatter", "pyg_lib")


def version(name: str) -> str | None:
    """Version of an installed package, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        name = ""
    return name or platform.processor() or platform.machine()


def cores() -> int:
    """How many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def load() -> float | None:
    """How many processes wanted a core of the machine in the last minute, for each core that it has; None where the
    system does not say. Of all its cores, also those that this process may not use."""
    try:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    except (AttributeError, OSError):
        return None


def gpus_of_the_machine() -> list[str]:
    """The GPUs that the driver lists, whatever torch sees."""
    if not shutil.which("nvidia-smi"):
        return []
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if not done.returncode else []


def _build(torch: dict, gpus: list[str]) -> dict:
    if "error" in torch:
        return {"loads": False, "advice": f"torch cannot be imported: {torch['error']}"}
    if "binary_error" in torch:
        old = not _torch_serves(torch["version"])
        return {"loads": False, "advice": "gnnaccel needs torch 2.4 or later" if old else torch["binary_error"]}
    cuda = torch["cuda_kernels"]
    if cuda and torch["gpus"]:
        advice = "CPU and CUDA kernels; both are used."
    elif cuda:
        advice = "CPU and CUDA kernels; torch sees no GPU here, so the CPU kernels are used."
    elif gpus:
        advice = "CPU kernels alone: CUDA tensors stay with the framework (docs/install.md has the build with CUDA)."
    else:
        advice = "CPU kernels alone; there is no GPU to want more."
    return {"loads": True, "cuda_kernels": cuda, "instruction_set": torch["isa"], "advice": advice}


def _on_cuda(name: str, gpu: bool) -> str:
    """What DGL's graphs on CUDA run on, where the machine has a GPU that our kernels use."""
    if name != "dgl" or not gpu:
        return ""
    if children.ask("dgl_cuda").get("has_cuda", True):
        return "; its own CUDA build keeps graphs on the GPU"
    return "; it was built without CUDA, so gnnaccel's bridge takes graphs to the GPU (docs/dgl-on-cuda.md)"


def _framework(name: str, binary_loads: bool, gpu: bool) -> dict:
    installed = version(name)
    if installed is None and util.find_spec(name) is None:
        builds = "" if installing.has_build(name) else ", which has no build for this Python"
        advice = f"not installed (gnnaccel is run with {name}=={versions.PINNED[name]}{builds})"
        return {"version": None, "imports": False, "accelerated": False, "advice": advice}
    answer = children.ask(name)
    if "error" in answer:
        advice = f"cannot be imported: {answer['error']}"
        return {"version": installed, "imports": False, "accelerated": False, "advice": advice}
    accelerated = bool(answer["accelerated"]) and binary_loads
    said = [*answer["messages"]]
    if accelerated:
        said.insert(0, "imports, and will be accelerated" + _on_cuda(name, gpu))
    found = answer["version"] or installed or ""
    if (words := versions.untried(name, found)) is not None:
        said.append(words)
    about = {"version": found, "imports": True, "accelerated": accelerated, "advice": "; ".join(said)}
    return about | {"missing": answer.get("missing", {})}


def _flag() -> dict:
    value = os.environ.get(switch.FLAG)
    try:
        return {"value": value, "means": switch.parse_flag(value)}
    except ValueError as error:
        return {"value": value, "means": f"error: {error}"}


def examine() -> dict:
    """Everything `doctor` says, as plain data."""
    torch = children.ask("torch")
    gpus = gpus_of_the_machine()
    build = _build(torch, gpus)
    gpu = build.get("cuda_kernels", False) and bool(torch.get("gpus"))
    frameworks = {name: _framework(name, build["loads"], gpu) for name in switch.BACKENDS}
    found = {
        "versions": {
            "gnnaccel": __version__,
            "python": platform.python_version(),
            "torch": torch.get("version", version("torch")),
            **{name: version(name) for name in _OPTIONAL},
        },
        "run_with": versions.PINNED,
        "torch_imports": "error" not in torch,
        "torch_serves": _torch_serves(torch.get("version", version("torch"))),
        "python": sys.executable,
        "build": build,
        "devices": {
            "cpu": cpu_name(),
            "cores": cores(),
            "load_of_a_core": load(),
            "threads": torch.get("threads"),
            "gpus": torch.get("gpus", []),
            "torch_cuda": torch.get("cuda"),
            "gpus_of_the_machine": gpus,
        },
        "messages": torch.get("messages"),
        "missing": torch.get("missing", {})
        | {k: v for one in frameworks.values() for k, v in one.get("missing", {}).items()},
        "frameworks": frameworks,
        "switch": {"installed": children.switch_is_installed(), "flag": _flag()},
        "complaints": settings.complaints(),
        "usable": build["loads"] and any(one["accelerated"] for one in frameworks.values()),
    }
    slow = [{"what": what, "why": why} for what, why in outlook.slow(found)]
    return found | {"fast": outlook.fast(found), "not_fast": slow, "next": outlook.next_command(found)}


def _torch_serves(found: str | None) -> bool:
    return found is not None and versions.release(found) >= versions.release(versions.TRIED["torch"][0])


def _torch_line(found: str | None) -> str:
    if found is None:
        return "not installed: gnnaccel needs torch 2.4 or later"
    if not _torch_serves(found):
        return f"{found}: too old, gnnaccel needs 2.4 or later"
    return versions.untried("torch", found) or found


def _switch_line(installed: bool) -> str:
    if installed:
        return "installed: GNNACCEL=1 python script.py accelerates here"
    return "not in this environment, so GNNACCEL=1 has no effect: python -m gnnaccel train.py, or install gnnaccel here"


def _kernels_line(picked: str) -> str:
    wanted = settings.value("GNNACCEL_ISA")
    missing = f"; GNNACCEL_ISA={wanted}, which this CPU lacks, is not used" if wanted not in ("", picked) else ""
    return f"for {picked}, picked at run time{missing}"


def _lines(found: dict) -> list[tuple[str, str]]:
    versions, build, devices = found["versions"], found["build"], found["devices"]
    flag = found["switch"]["flag"]
    lines = [("gnnaccel", versions["gnnaccel"]), ("python", f"{versions['python']}  {found['python']}")]
    lines.append(("torch", _torch_line(versions["torch"])))
    beside = [f"{name} {versions[name]}" for name in _OPTIONAL if versions[name]]
    if beside:
        lines.append(("beside PyG", ", ".join(beside)))
    if found["frameworks"]["torch_geometric"]["accelerated"] and not (versions["pyg_lib"] or versions["torch_sparse"]):
        lines.append(("PyG's loaders", "neither pyg-lib nor torch-sparse is here: those that sample need gnnaccel"))
    lines.append(("build", build["advice"]))
    if build["loads"]:
        lines.append(("CPU kernels", _kernels_line(build["instruction_set"])))
    threads = f", torch runs {devices['threads']} threads" if devices["threads"] else ""
    lines.append(("CPU", f"{devices['cpu']}, {devices['cores']} cores{threads}"))
    unseen = f"none that torch sees; the driver lists {', '.join(devices['gpus_of_the_machine'])}"
    none = unseen if devices["gpus_of_the_machine"] else "none"
    lines.append(("GPU", ", ".join(devices["gpus"]) or none))
    messages = found["messages"]
    if messages is not None:
        fused = f"one kernel each, compiled by NVRTC {messages['nvrtc']}, kept in {messages['folder']}"
        lines.append(("messages on CUDA", f"stored: {messages['why']}" if messages["why"] else fused))
    for name, one in found["frameworks"].items():
        lines.append((switch.NAMES[name], " ".join(filter(None, (one["version"], one["advice"])))))
    missing = [f"{name}, therefore: {words}" for name, words in found["missing"].items()]
    lines += [("names missing" if not nth else "", line) for nth, line in enumerate(missing)]
    lines.append(("flag's .pth file", _switch_line(found["switch"]["installed"])))
    if flag["value"] is not None:
        lines.append(("GNNACCEL", f"{flag['value']} ({flag['means']})"))
    lines += [("environment", complaint) for complaint in found["complaints"]]
    verdict = "ready" if found["usable"] else "nothing can be accelerated here; the lines above say why"
    lines.append(("verdict", verdict))
    lines += [("fast" if not nth else "", what) for nth, what in enumerate(found["fast"])]
    for nth, one in enumerate(found["not_fast"]):
        lines.append(("not, or hardly" if not nth else "", f"{one['what']}: {one['why']}"))
    return [*lines, ("next", found["next"])]


def show(as_json: bool) -> int:
    """Print what `examine` found: 0 if something can be accelerated, else 1."""
    found = examine()
    if as_json:
        print(json.dumps(found, indent=1))
    elif not sys.stdout.isatty():
        for name, text in _lines(found):
            print(f"{name:<{_NAME_WIDTH}} {text}")
    else:
        from rich.table import Table

        from gnnaccel.cli.output import console

        table = Table.grid(padding=(0, 2))
        *lines, (_, command) = _lines(found)
        for name, text in lines:
            table.add_row(name, text)
        console().print(table)
        print(f"next: {command}")  # in one piece, to be copied
    return 0 if found["usable"] else 1
