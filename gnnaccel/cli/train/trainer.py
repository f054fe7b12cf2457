"""Trains one model on one graph, and writes what it measured as JSON. One line of JSON per epoch goes to stdout.

    python trainer.py --framework dgl --model gcn --data graph.npz --result result.json

graph.npz: edge_index int64 [2, E], sources first; x float32 [N, F]; y int64 [N]; train_mask, test_mask bool [N];
num_classes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import time

import numpy as np
import torch
import torch.nn.functional as F
from models import make_model


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=["dgl", "pyg"], required=True)
    parser.add_argument("--model", choices=["gcn", "sage", "gin", "gat", "agnn"], required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--result", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--capture", action="store_true", help="gnnaccel.captured around the training step")
    parser.add_argument(
        "--sample", help="neighbours of each layer: 15,10,5; trains on batches, an epoch is all of them"
    )
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--gnnaccel-sampler", action="store_true", help="draw PyG's batches with gnnaccel, and no more")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    for name, default in (("epochs", 50), ("seed", 0), ("hidden", 16), ("heads", 4), ("layers", 2), ("maxk", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, value in (("lr", 0.01), ("dropout", 0.5), ("weight-decay", 5e-4)):
        parser.add_argument(f"--{name}", type=float, default=value)
    return parser.parse_args()


def resident_bytes(field: str) -> int:
    """VmRSS, what this process holds in memory now, or VmHWM, the most it held."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


class Memory:
    """The most memory that was held at a time beyond what was held when this object was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        self.known = True
        self.forget_peak()
        if self.known:
            self.before = resident_bytes("VmRSS")

    def forget_peak(self) -> None:
        """Leave out what was held at a time until now, and is held no longer."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")  # resets VmHWM
        except OSError:  # not Linux, or not allowed: then the peak may be one of loading the data
            self.known = False

    def extra_bytes(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() - self.before
        return max(0, resident_bytes("VmHWM") - self.before) if self.known else None


def warm_up(device: torch.device) -> None:
    """A step of a small dense model: what torch loads and starts at its first step is nobody's epoch or memory."""
    model = torch.nn.Linear(32, 32).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    F.cross_entropy(
        model(torch.rand(64, 32, device=device)), torch.zeros(64, dtype=torch.long, device=device)
    ).backward()
    optimizer.step()


def timed_ms(work, device: torch.device) -> tuple[float, float]:
    """Milliseconds that `work` takes until the device is done, and the value of the tensor that it gives."""
    start = time.perf_counter()
    value = work().item()  # waits for the device
    if device.type == "cuda":
        torch.cuda.synchronize()  # the optimizer's step comes after the loss
    return (time.perf_counter() - start) * 1e3, value


def compile_ms(loss_of_model, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Have torch.compile do its work, weights as they are: milliseconds that this took beyond what it made takes."""

    def forward_and_backward() -> torch.Tensor:
        loss = loss_of_model()
        loss.backward()
        return loss

    times = [timed_ms(forward_and_backward, device)[0] for _ in range(3)]  # the second one may compile again
    optimizer.zero_grad()
    return max(0.0, sum(times) - len(times) * times[-1])


def train(step, epochs: int, device: torch.device) -> tuple[list[float], list[float], list[int]]:
    """Run `step`, which gives the loss, `epochs` times: times in milliseconds, losses, and when it was captured."""
    times, losses, captures, variants = [], [], [], 0
    for epoch in range(1, epochs + 1):
        time_ms, loss = timed_ms(step, device)
        times.append(time_ms)
        losses.append(loss)
        if getattr(step, "variants", 0) > variants:
            captures.append(epoch)
        variants = getattr(step, "variants", 0)
        print(json.dumps({"epoch": epoch, "loss": loss, "time_ms": time_ms}), flush=True)
    return times, losses, captures


def sampled_epoch(given, layers, model, optimizer, on_host, device: torch.device):
    """A function that trains on all batches once, and gives the mean loss of their nodes."""
    edge_index, x, y, train_mask = on_host
    graph = layers.make_graph(edge_index, len(x), given.model, torch.device("cpu"))
    fanouts = [int(word) for word in given.sample.split(",")]
    batches = layers.Batches(graph, x, y, train_mask.nonzero().flatten(), fanouts, given.batch_size, device)

    def epoch() -> torch.Tensor:
        model.train()
        total, nodes = torch.zeros((), device=device), 0
        for sampled, features, labels in batches:
            count = len(labels)
            optimizer.zero_grad()
            out = model(sampled, features)[:count]
            loss = F.cross_entropy(out, labels)
            loss.backward()
            optimizer.step()
            total += loss.detach() * count
            nodes += count
        return total / max(nodes, 1)

    return epoch


def main() -> None:
    given = options()
    if given.threads:
        torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    layers = importlib.import_module(f"{given.framework}_layers")
    with np.load(given.data) as file:
        edge_index, x, y, train_mask, test_mask = (
            torch.from_numpy(file[key]) for key in ("edge_index", "x", "y", "train_mask", "test_mask")
        )
        classes = int(file["num_classes"])
    if given.gnnaccel_sampler:
        from gnnaccel.pyg_backend import samplers

        samplers.enable()
    on_host = (edge_index, x, y, train_mask)
    graph = layers.make_graph(edge_index, len(x), given.model, device)
    x, y, train_mask, test_mask = (tensor.to(device) for tensor in (x, y, train_mask, test_mask))

    torch.manual_seed(given.seed)
    shape = (x.shape[1], given.hidden, classes, given.heads, given.layers, given.dropout)
    model = make_model(layers, given.model, *shape).to(device)
    if given.maxk:
        import gnnaccel

        gnnaccel.accelerate(model, maxk=given.maxk)
    optimizer = torch.optim.Adam(model.parameters(), lr=given.lr, weight_decay=given.weight_decay)

    trained = torch.compile(model) if given.compile else model

    def loss_of_model() -> torch.Tensor:
        return F.cross_entropy(trained(graph, x)[train_mask], y[train_mask])

    def step() -> torch.Tensor:
        model.train()
        optimizer.zero_grad()
        loss = loss_of_model()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if given.sample:
        step = sampled_epoch(given, layers, model, optimizer, on_host, device)
    if given.capture:
        import gnnaccel

        step = gnnaccel.captured(step)
    warm_up(device)
    memory = Memory(device)
    compile_time_ms = compile_ms(loss_of_model, optimizer, device) if given.compile else None
    memory.forget_peak()
    torch.manual_seed(given.seed)
    times, losses, captures = train(step, given.epochs, device)
    extra_bytes = memory.extra_bytes()
    model.eval()
    with torch.no_grad():
        right = (model(graph, x).argmax(1) == y)[test_mask]
    result = {
        "epoch_time_ms": times,
        "loss": losses,
        "compile_time_ms": compile_time_ms,
        "capture_epochs": captures,
        "extra_memory_bytes": extra_bytes,
        "test_accuracy": int(right.sum()) / len(right) if len(right) else None,
        "threads": torch.get_num_threads(),
        "device_name": torch.cuda.get_device_name() if device.type == "cuda" else "",
        "torch": torch.__version__,
        "framework_version": importlib.import_module(
            {"dgl": "dgl", "pyg": "torch_geometric"}[given.framework]
        ).__version__,
    }
    with open(given.result, "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
