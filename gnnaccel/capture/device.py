"""Recording on one GPU: a CUDA graph, the stream that it is made on, and what tells that none can be made."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnnaccel import touch
from gnnaccel.lower import choose

_streams: dict[int, torch.cuda.Stream] = {}
_pools: dict[int, Any] = {}
_collecting = threading.Lock()
_uncollected, _collects = 0, True  # captures under way, of all threads; whether Python collected before
_replayed: dict[int, tuple[int, torch.cuda.Stream]] = {}  # on which the last replay was: its handle, and it


def _stream() -> torch.cuda.Stream:
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    return _streams[device]


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Python's garbage collector waits: it might free an old CUDA graph, which ends a capture with an error."""
    global _uncollected, _collects
    with _collecting:
        if _uncollected == 0:
            _collects = gc.isenabled()
            gc.disable()
        _uncollected += 1
    try:
        yield
    finally:
        with _collecting:
            _uncollected -= 1
            if _uncollected == 0 and _collects:
                gc.enable()


class Recording:
    """A CUDA graph of what a function did, in memory that it shares with the other recordings of this device.

    Parameters
    ----------
    tensors : list of Tensor
        That it may read and write.
    pool : what `pool()` gave, optional
        Memory to take instead, where results are to outlive the replays of other recordings.

    Attributes
    ----------
    memory_bytes : int
        By how much it raised the GPU memory that torch has reserved.
    """

    def __init__(self, tensors: list[Tensor], pool: Any = None):
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self.memory_bytes = 0

    @staticmethod
    def pool() -> Any:
        """Memory for recordings of their own."""
        return torch.cuda.graph_pool_handle()

    @staticmethod
    def most_bytes() -> int:
        """How much of the GPU's memory the captures of one module may hold."""
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory // 4

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        """True for a tensor that a recording reads where it is."""
        return tensor.is_cuda

    @staticmethod
    def unfit(tensors: list[Tensor]) -> str | None:
        """Why nothing that works on `tensors` can be recorded; None if it may."""
        devices = {x.device for x in tensors if x.is_cuda}
        if not devices:
            return "its tensors are on the CPU"
        if len(devices) > 1 or devices != {torch.device("cuda", torch.cuda.current_device())}:
            return "its tensors are not all on the current GPU"
        return None

    @staticmethod
    def busy() -> bool:
        """True while something is captured already."""
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    @staticmethod
    def host_random() -> tuple:
        """The states of the host's generators of random numbers: another one where numbers were drawn."""
        numpy = sys.modules.get("numpy")
        drawn = repr(numpy.random.get_state()) if numpy is not None else ""
        return random.getstate(), drawn, bytes(torch.get_rng_state().numpy())

    @staticmethod
    @contextlib.contextmanager
    def warming() -> Iterator[None]:
        """On the stream that recordings are made on, in order with the present one."""
        stream, present = _stream(), torch.cuda.current_stream()
        stream.wait_stream(present)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            present.wait_stream(stream)

    @staticmethod
    @contextlib.contextmanager
    def watching() -> Iterator[list[str]]:
        """Gives the places at which the host waited for the GPU, filled at the end. What is called runs as it will be
        recorded."""
        places: list[str] = []
        before = torch.cuda.get_sync_debug_mode()
        with choose.lasting(), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield places
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for each in seen:
            if "synchronizing CUDA operation" in str(each.message):
                places.append(f"{each.filename}:{each.lineno}")
            elif "synchronization debug mode" not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)

    def scalar(self, value: float) -> Tensor:
        """A number that later replays read."""
        return torch.tensor(value, dtype=torch.float32, device="cuda")

    def record(self, function: Callable[[], Any]) -> Any:
        """Record function(), which runs on the host alone, and give what it returned.

        Raises
        ------
        Exception
            What `function` raised, or CUDA, where it did what cannot be recorded. Nothing was run on the GPU.
        """
        device = torch.cuda.current_device()
        if self._pool is None and device not in _pools:
            _pools[device] = torch.cuda.graph_pool_handle()
        pool = _pools[device] if self._pool is None else self._pool
        try:
            recording = torch.cuda.graph(self._graph, pool=pool, stream=_stream(), capture_error_mode="thread_local")
            with _without_collection(), choose.lasting(), recording:
                before = torch.cuda.memory_reserved()  # not earlier: its beginning gives back what torch has cached
                out = function()
                self.memory_bytes = torch.cuda.memory_reserved() - before
        except BaseException:
            # A capture that ended early leaves the pool and the generator waiting for its end.
            with contextlib.suppress(Exception):
                touch.end_allocation(device, pool)
            if self._pool is None:
                del _pools[device]
            generator = torch.cuda.default_generators[device]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        return out

    @staticmethod
    def follow() -> None:
        """What comes on the present stream runs after all replays before: recordings share memory, and have inputs."""
        device = torch.cuda.current_device()
        handle, last = touch.raw_stream(device), _replayed.get(device)
        if last is not None and last[0] == handle:
            return
        stream = torch.cuda.current_stream()
        if last is not None:
            stream.wait_stream(last[1])
        _replayed[device] = handle, stream

    def replay(self) -> None:
        """Run it on the present stream, after all replays before."""
        self.follow()
        self._graph.replay()
