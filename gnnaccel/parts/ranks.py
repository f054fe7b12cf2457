"""The ranks of a job as one: joined, brought to one opinion, and their failures told in words."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from gnnaccel import touch

TIMEOUT_S = 300.0
_NUMBERS = 16  # of a signature


def join(device: torch.device | str | None = None, *, timeout_s: float = TIMEOUT_S) -> torch.device:
    """Start torch.distributed if nobody has, by the environment that torchrun sets; the device of this rank.

    Parameters
    ----------
    device : torch.device, optional
        Default: the GPU of this rank on its machine, if each rank there has one, else the CPU. "cuda" where there are
        more ranks than GPUs: they share them.
    timeout_s : float
        For how long a rank waits for others before it ends with an error. NCCL on CUDA, gloo on the CPU and for ranks
        that share GPUs.

    Raises
    ------
    RuntimeError
        Outside torchrun, with what to run; where the ranks do not meet within the time.
    """
    if not dist.is_available():
        raise RuntimeError("distributed.join: this torch was built without torch.distributed")
    place, backend = _place(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if dist.is_initialized():
        return place
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"distributed.join: {', '.join(missing)} not set: run the script by torchrun --nproc-per-node N script.py, "
            "or call torch.distributed.init_process_group before"
        )
    timeout = datetime.timedelta(seconds=timeout_s)
    with told("joining the other ranks"):
        if backend == "nccl":
            # Before kernels that were there first: else a sum over edges, which fills the GPU, holds rows back.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            touch.set_timeout(options, timeout)
            dist.init_process_group("nccl", timeout=timeout, device_id=place, pg_options=options)
        else:
            dist.init_process_group("gloo", timeout=timeout)
            atexit.register(_leave)
    return place


def _place(device: torch.device | str | None) -> tuple[torch.device, str]:
    """The device of this rank, and the backend for it: NCCL takes one GPU per rank."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    shared = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > gpus
    if device is None:
        started = dist.get_backend() if dist.is_initialized() else None
        on_gpu = gpus > 0 and (not shared if started is None else "nccl" in started)
        device = "cuda" if on_gpu else "cpu"
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", local % gpus if gpus else local)
    return place, "nccl" if place.type == "cuda" and not shared else "gloo"


def _leave() -> None:
    """End gloo's threads before Python ends. One that has just finished an exchange lets go of its tensors, for which
    it needs Python; once that is ending, the process is aborted: whatever it was about to return."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def told(doing: str) -> Iterator[None]:
    """What torch.distributed raises inside, as one RuntimeError that says what this rank was doing, and what to do."""
    try:
        yield
    except RuntimeError as error:
        rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "?")
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise RuntimeError(
            f"gnnaccel.distributed: rank {rank}: {doing} failed: another rank has ended, fell behind, or took another "
            f"way through the program; see what that one printed ({reason})"
        ) from error


def all_agree(problem: str | None, what: str) -> None:
    """Raise on every rank what is wrong on any of them: nobody goes on to wait for one that has given up.

    Raises
    ------
    RuntimeError
        With each rank's problem; ValueError on the ranks whose own input it is.
    """
    problems: list[str | None] = [None] * dist.get_world_size()
    with told(what):
        dist.all_gather_object(problems, problem)
    ranks: dict[str, list[str]] = {}  # that say the same
    for rank, said in enumerate(problems):
        if said is not None:
            ranks.setdefault(said, []).append(str(rank))
    if ranks:
        _wait_for_others()
    found = [f"rank {', '.join(numbers)}: {said}" for said, numbers in ranks.items()]
    if problem is not None:
        raise ValueError(problem if len(found) == 1 else "; ".join(found))
    if found:
        raise RuntimeError(f"gnnaccel.distributed: {what} failed on another rank: " + "; ".join(found))


def same_everywhere(numbers: list[int], device: torch.device, what: str, described: str) -> None:
    """Raise on every rank unless all give the same numbers.

    Raises
    ------
    RuntimeError
        Naming the ranks that differ.
    """
    mine = torch.tensor((numbers + [0] * _NUMBERS)[:_NUMBERS], dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with told(what):
        dist.all_gather(every, mine)
    others = [rank for rank, theirs in enumerate(every) if not torch.equal(theirs, mine)]
    if others:
        _wait_for_others()
        raise RuntimeError(
            f"gnnaccel.distributed: {what}: rank {dist.get_rank()} has {described}, and rank "
            f"{', '.join(map(str, others))} something else: the ranks must run the same model on data of the same kind"
        )


def _wait_for_others() -> None:
    """Until each rank knows what is wrong, so that none leaves, and its connections with it, before another has read
    it. What fails in this is no news."""
    with contextlib.suppress(RuntimeError):
        dist.barrier()


def summed(x: Tensor) -> Tensor:
    """The sum of `x` over all ranks, in `x`; no gradient."""
    with told("a sum over all ranks"):
        dist.all_reduce(x)
    return x
