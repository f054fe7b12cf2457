"""The GPU samples on a stream of its own: the host, which waits for the sizes of a batch, does not wait for training
steps that were launched before, and launches the next one while they run.

``GNNACCEL_SAMPLER_AHEAD`` says how many steps the host may be ahead of the GPU; 0: batches are sampled on the stream
that trains, one after the other.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from gnnaccel import settings
from gnnaccel.lower import bounds

VARIABLE = "GNNACCEL_SAMPLER_AHEAD"
_lanes: dict[torch.device, _Lane] = {}


class _Lane:
    """The stream of a GPU, an event of the training stream for each of the last batches, and what was made last."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device, priority=-1)  # or its small kernels would wait for large ones
        self.steps: collections.deque[torch.cuda.Event] = collections.deque()
        self.made: list[weakref.ref[Tensor]] = []


def depth() -> int:
    """How many steps the host may be ahead."""
    said = settings.value(VARIABLE)
    if said.isdecimal():
        return int(said)
    return 0 if said and said in settings.OFF else bounds.BATCHES_AHEAD  # "off" and "on"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor, of the host's memory, on a GPU as soon as the current stream has come so far; nobody waits."""
    return tensor.pin_memory().to(device, non_blocking=True)


def room(count: int, dtype: torch.dtype) -> Tensor:
    """Host memory that a GPU copies from while the host goes on."""
    return torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)


def _lane(device: torch.device) -> _Lane:
    lane = _lanes.get(device)
    if lane is None:
        lane = _lanes[device] = _Lane(device)
    return lane


def is_on() -> bool:
    """True where the GPU samples on a stream of its own."""
    return bool(depth()) and not torch.cuda.is_current_stream_capturing()


def on_its_stream(device: torch.device):
    """A context of which nobody waits for what is launched inside: it is for one of `beside` to come."""
    return torch.cuda.stream(_lane(device).stream)


@contextlib.contextmanager
def beside(device: torch.device, is_step: bool = True) -> Iterator[list[Tensor]]:
    """What is inside runs on the sampler's stream of a GPU.

    It must read nothing but what is there for good, or was made on that stream. What is used outside goes into the
    list: the current stream waits for it. `is_step`: a batch begins, for which the host may have to wait.
    """
    made: list[Tensor] = []
    most = depth()
    if not most or torch.cuda.is_current_stream_capturing():
        yield made
        return
    lane, current = _lane(device), torch.cuda.current_stream(device)
    if is_step:
        lane.steps.append(current.record_event())
    while len(lane.steps) > most:
        lane.steps.popleft().synchronize()
    with torch.cuda.stream(lane.stream):
        yield made
    current.wait_stream(lane.stream)
    for tensor in made:
        tensor.record_stream(current)
    lane.made = list(map(weakref.ref, made))


def is_beside(*tensors: Tensor) -> bool:
    """True for tensors that the last `beside` of their GPU has made: what reads no others may go on there."""
    lane = _lanes.get(tensors[0].device)
    made = () if lane is None else {id(tensor) for ref in lane.made if (tensor := ref()) is not None}
    return all(id(tensor) in made for tensor in tensors)
