"""Questions about what is installed, answered as one line of JSON in a process that may break doing so.

python -m gnnaccel.cli.probe torch | dgl | torch_geometric | dgl_cuda | prepare FRAMEWORK GRAPH.npz MODEL DEVICE THREADS
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path


def torch_and_binary() -> dict:
    """torch's version, devices and threads; what the binary was built with and picked."""
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    answer: dict = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "gpus": gpus,
    }
    try:
        from gnnaccel import _library
    except ImportError as error:
        return answer | {"binary_error": str(error)}
    from gnnaccel.touch import MISSING

    answer |= {"cuda_kernels": _library.has_cuda_kernels(), "isa": _library.isa(), "missing": MISSING}
    if gpus and answer["cuda_kernels"]:
        from gnnaccel.ops.messages import nvrtc

        answer["messages"] = nvrtc.described()
    return answer


_OWN = "what needs it is the framework's own"


class _Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def framework(name: str) -> dict:
    """Import `name` as a program under the flag would: its version, whether its backend was enabled, and what it
    lacks."""
    import gnnaccel
    from gnnaccel import switch

    kept = _Keep()
    kept.setLevel(logging.WARNING)
    logging.getLogger("gnnaccel").addHandler(kept)
    gnnaccel.install()
    module = importlib.import_module(name)
    answer: dict = {"version": getattr(module, "__version__", ""), "accelerated": name in switch.enabled()}
    messages = kept.messages
    if answer["accelerated"]:
        touch = importlib.import_module(f"{switch.BACKENDS[name]}.touch")
        missing = touch.MISSING if isinstance(touch.MISSING, dict) else dict.fromkeys(sorted(touch.MISSING), _OWN)
        # What `doctor` says in places of their own.
        apart = [*missing, *importlib.import_module("gnnaccel.touch").MISSING, "was never tried"]
        messages = [one for one in messages if not any(words in one for words in apart)]
        answer["missing"] = missing
    return answer | {"messages": messages}


def dgl_has_cuda() -> dict:
    """Whether the installed DGL can put a graph on a GPU: asked of its library, so that it needs no GPU."""
    import gnnaccel

    gnnaccel.install(compat_only=True)
    from dgl import ndarray

    try:
        ndarray.empty((1,), "float32", ndarray.gpu(0))
    except Exception as error:
        return {"has_cuda": "not enabled" not in str(error)}
    return {"has_cuda": True}


def prepare(name: str, data: str, model: str, device: str, threads: str) -> dict:
    """How long `gnnaccel.prepare` takes for the graph that a training program is handed."""
    import numpy as np
    import torch

    import gnnaccel

    gnnaccel.install()
    if int(threads):
        torch.set_num_threads(int(threads))
    sys.path.insert(0, str(Path(__file__).parent / "train"))
    layers = importlib.import_module(f"{name}_layers")
    with np.load(data) as file:
        edge_index, num_nodes = torch.from_numpy(file["edge_index"]), len(file["y"])

    def prepared():
        return gnnaccel.prepare(layers.make_graph(edge_index.clone(), num_nodes, model, torch.device(device)))

    prepared()  # loads what is loaded once: on CUDA, the kernels that a graph of this size takes
    done = prepared()
    return {"time_ms": done.time_ms, "workspace_bytes": done.workspace_bytes}


def main(words: list[str]) -> dict:
    question, *arguments = words
    if question == "torch":
        return torch_and_binary()
    if question == "dgl_cuda":
        return dgl_has_cuda()
    if question == "prepare":
        return prepare(*arguments)
    return framework(question)


if __name__ == "__main__":
    try:
        answer = main(sys.argv[1:])
    except BaseException as error:  # also what a broken extension module raises, or a framework that exits
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))
