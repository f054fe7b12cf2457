"""What will be fast on a machine, what will not and why, and what to do next: of what `doctor` has found, in words."""

from __future__ import annotations

import os
from typing import Any

from gnnaccel.cli import installing

# What gains, with the figures in docs/performance.md. Small: where products of matrices and Python take the time.
_FAST = {
    "torch_geometric": "PyG: sums, means, extremes and attention over edges, in the layers of PyG and in yours",
    "dgl": "DGL: attention, weighted sums, edge softmax, messages and reductions of your own",
}
_BUSY = 1.5  # processes that want a core, for each that there is
_SMALL = "graphs of some ten thousand edges"


def fast(found: dict[str, Any]) -> list[str]:
    """What will be faster than the framework alone."""
    accelerated = [name for name, one in found["frameworks"].items() if one["accelerated"]]
    if not accelerated:
        return []
    where = ", on the CPU and the GPU" if _on_gpu(found) else ", on the CPU"
    return [_FAST[name] + where for name in ("torch_geometric", "dgl") if name in accelerated]


def slow(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What will not be, each with the reason and what helps."""
    build, devices, frameworks = found["build"], found["devices"], found["frameworks"]
    said = [
        (_name(name), one["advice"]) for name, one in frameworks.items() if one["imports"] and not one["accelerated"]
    ]
    if not build["loads"]:
        return [("everything", build["advice"]), *said]
    if devices["gpus"] and not build["cuda_kernels"]:
        said.append(("tensors on the GPU", "this build has no CUDA half: they stay with the framework"))
    elif devices["gpus_of_the_machine"] and not devices["gpus"]:
        said.append(("the GPU", _unseen(found)))
    if _on_gpu(found):
        why = "a step waits for Python: GNNACCEL_CUDA_GRAPHS=1, or gnnaccel.captured (docs/capture.md)"
        said.append((_SMALL + " on the GPU", why))
    elif fast(found):
        said.append((_SMALL + " and fewer", "products of matrices and Python take the time: expect 1 to 4 times"))
    if frameworks.get("dgl", {}).get("accelerated"):
        said.append(("DGL's plain sums on the CPU (GraphConv, SAGEConv)", "DGL's own kernels are as good at these"))
    if build.get("instruction_set") == "baseline":
        said.append(("the CPU", "it has no AVX2, or GNNACCEL_ISA=baseline is set: kernels without vectors"))
    threads, cores = devices["threads"] or 0, devices["cores"]
    if threads > cores:
        why = f"torch runs {threads} threads on {cores} cores, which get in each other's way: OMP_NUM_THREADS={cores}"
        said.append(("all on the CPU", why))
    elif (devices["load_of_a_core"] or 0) > _BUSY:
        why = f"the machine is busy, with a load of {devices['load_of_a_core']} on each core: times tell little, and "
        said.append(("all on the CPU", why + "threads wait for each other (fewer: OMP_NUM_THREADS=1)"))
    return said


def next_command(found: dict[str, Any]) -> str:
    """The one command to type now."""
    build, devices, run_with = found["build"], found["devices"], found["run_with"]
    gpu = bool(devices["gpus_of_the_machine"] or devices["gpus"])
    if not found["torch_serves"]:
        return installing.torch(run_with["torch"], gpu)
    if not found["torch_imports"]:
        return f'{installing.python()} -c "import torch"    # to see why it cannot be imported'
    if not build["loads"]:
        return installing.gnnaccel(bool(devices["gpus"]))
    if not any(one["version"] for one in found["frameworks"].values()):
        command = installing.framework("torch_geometric", run_with["torch_geometric"])
        return command + (f"    # or dgl=={run_with['dgl']}" if installing.has_build("dgl") else "")
    if not found["usable"]:
        return "gnnaccel doctor --report report.json    # and open an issue with it"
    if gpu and not devices["gpus"] and not devices["torch_cuda"]:
        return installing.torch(found["versions"]["torch"].partition("+")[0], gpu, instead=True)
    if devices["gpus"] and not build["cuda_kernels"]:
        return installing.gnnaccel(True)
    is_on = found["switch"]["flag"]["means"] == "on"
    return "gnnaccel compare --suite" if is_on else f"{installing.python()} -m gnnaccel --profile train.py"


def _unseen(found: dict[str, Any]) -> str:
    """Why torch sees no GPU where the driver lists one."""
    torch, cuda = found["versions"]["torch"], found["devices"]["torch_cuda"]
    if not cuda:
        return f"torch {torch} is a build without CUDA: one with it sees the GPU"
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"torch {torch} sees none: CUDA_VISIBLE_DEVICES is {visible!r}"
    why = f"often a driver older than CUDA {cuda}; python -c 'import torch; torch.zeros(1).cuda()' says it"
    return f"torch {torch} sees none: {why}"


def _on_gpu(found: dict[str, Any]) -> bool:
    return bool(found["build"].get("cuda_kernels") and found["devices"]["gpus"])


def _name(package: str) -> str:
    return {"dgl": "DGL", "torch_geometric": "PyTorch Geometric"}[package]
