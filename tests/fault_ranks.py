"""Programs for the ranks of test_distributed_faults.py: ``python fault_ranks.py PROGRAM ARGUMENTS``. Ranks that fail,
memory that does not suffice, and checkpoints."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from part_ranks import train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch_geometric import nn as pyg

from gnnaccel import distributed
from gnnaccel.parts.exchange import Exchange
from gnnaccel.parts.ranks import all_agree, same_everywhere


def die_at(exchange: int) -> None:
    """This process is killed where so many exchanges from now begin, and others wait for it in that."""
    original, left = Exchange._started, [exchange]

    def started(self, *arguments):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments)

    Exchange._started = started


def dies(folder: str, how: str, device: str = "cpu") -> None:
    """One rank leaves the others in the middle of training."""
    part = distributed.load(folder, device=device, timeout_s=8)
    width = 4 if how == "shapes" and part.rank else 6
    model = None
    if how != "shapes":
        model = pyg.GCN(6, 4 + (how == "models" and part.rank), 2, 3).double().to(part.device)
        model = distributed.wrap(model, part)
    for epoch in range(5):
        if epoch == 2 and part.rank == 1:
            if how == "exits":
                os._exit(3)
            if how == "raises":
                raise ValueError("a fault of this rank's own")
            if how == "sleeps":
                time.sleep(20)
            if how in ("killed forward", "killed backward"):
                die_at(1 if how == "killed forward" else 2)
        if model is None:
            part.exchange(part.x[:, :width])
        else:
            part.mean(model(part.x, part.edge_index)).backward()
    if part.device.type == "cuda":
        torch.cuda.synchronize()
    print("went on")


def leaves(how: str) -> None:
    """Ends by an exception, or as a program does, with what it joined still there; says if that was ended before."""
    atexit.register(lambda: print("left in order" if not dist.is_initialized() else "still joined"))  # runs last
    distributed.join("cpu", timeout_s=60)
    if how == "differs":
        same_everywhere([dist.get_rank()], torch.device("cpu"), "a test", "its number")
    all_agree("a problem" if how == "raises" and dist.get_rank() else None, "a test")
    sys.exit(0)


def limit_memory(budget_mib: str) -> None:
    """So much beyond what this process has; files that are mapped to be read do not count."""
    with open("/proc/self/status") as file:
        used_kib = next(int(line.split()[1]) for line in file if line.startswith("VmData"))
    limit = (used_kib + int(budget_mib) * 1024) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def cuts(features: str, folder: str, budget_mib: str) -> None:
    """Cuts a graph whose features do not fit."""
    x = np.load(features, mmap_mode="r")
    edges = torch.randint(0, len(x), (2, 4 * len(x)), generator=torch.Generator().manual_seed(0))
    limit_memory(budget_mib)
    try:
        np.array(x)
    except MemoryError:
        distributed.partition(edges, 4, folder, "range", nodes={"x": x}, num_nodes=len(x))
    else:
        sys.exit("the features fit")


def limited(folder: str, budget_mib: str) -> None:
    """Trains with so much memory beyond what a process has when its imports are done."""
    joined = distributed.join("cpu", timeout_s=60)
    limit_memory(budget_mib)
    part = distributed.load(folder, device=joined)
    model = distributed.wrap(pyg.GraphSAGE(part.num_features, 256, 2, 8), part)
    train(model, part, part.mean, 2)


def checkpoint(folder: str, kept: str, epochs: str, go_on: str) -> None:
    """Trains, from a checkpoint of torch.distributed.checkpoint or the beginning; writes one, and prints losses."""
    part = distributed.load(folder, device="cpu", timeout_s=60)
    torch.manual_seed(part.rank)
    model = distributed.wrap(pyg.GraphSAGE(6, 4, 2, 3, norm="batch_norm").double(), part)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if go_on == "model":
        found = {"model": model.state_dict()}
        dcp.load(found, checkpoint_id=kept)
        model.load_state_dict(found["model"])
    elif go_on == "all":
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=kept)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    labels = (part.x.sum(1) > 0).long()
    for _ in range(int(epochs)):
        loss = part.mean(F.cross_entropy(model(part.x, part.edge_index), labels, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", repr(loss.item()))
    if go_on == "nothing":
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=kept)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
    if dist.is_initialized():
        dist.destroy_process_group()
