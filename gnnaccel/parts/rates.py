"""How fast kernels are: of a GPU as committed results have it, or of this machine, measured."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from gnnaccel import ops
from gnnaccel.graph.csr import Graph

_WIDTH, _HEADS = 128, 4
_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Rates:
    """What `gnnaccel.parts.estimate` divides by. GB/s are 1e9 bytes of float32 rows that edges read or passes go over.

    sum_gbs : of sums over edges. attention_gbs : of a GAT's attention, forward and backward together.
    dense_tflops : of products of matrices. stream_gbs : of passes over rows.
    layer_us : what a layer takes beside, forward and backward; where `asynchronous`, at the same time.
    base_gib : memory that a process takes before it has data.
    """

    name: str
    source: str
    sum_gbs: float
    attention_gbs: float
    dense_tflops: float
    stream_gbs: float
    layer_us: float
    asynchronous: bool
    base_gib: float


# sum_gbs: grid_h100.csv, amazon0505-like, 256 wide: 4.88M edges in 1.115 ms. attention_gbs: that over 3.7, which an
# attention, forward and backward, takes of a sum in cuda_attention_h200.csv (arxiv-like, additive, 1 x 128).
# stream_gbs: the copy in the head of grid_h100.csv. layer_us: half of an epoch of two layers on Cora,
# epochs_modules_h100.csv, flag. dense_tflops: such that GCN on one GPU takes the 8.72 ms of distributed_1_h100.csv;
# float32, not TF32. base_gib: a CUDA context and NCCL's buffers.
H100 = Rates(
    name="h100",
    source="benchmarks/results: grid_h100, cuda_attention_h200, epochs_modules_h100, distributed_1_h100",
    sum_gbs=4480,
    attention_gbs=1210,
    dense_tflops=29,
    stream_gbs=3000,
    layer_us=570,
    asynchronous=True,
    base_gib=1.0,
)


@torch.inference_mode(False)
@torch.enable_grad()
def measured(graph: Graph, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """The rates of this machine, on the device of `graph` and by its edges; a few seconds.

    clock : in seconds; time.process_time counts a CPU's work alone, where others work beside.

    Notes
    -----
    Medians of several rounds each, of operations and their gradients together. base_gib: what this process takes now.
    """
    device = graph.device

    def taken(run: Callable[[], object], rounds: int = _ROUNDS) -> float:
        return _taken(run, device, clock, rounds)

    x = torch.ones(graph.num_cols, _WIDTH, device=device)
    own = x[: graph.num_rows]
    grad = torch.ones_like(own)
    weight = torch.ones(_WIDTH, _WIDTH, device=device)
    sum_s = taken(lambda: (ops.spmm(graph, x), ops.spmm(graph.transposed, grad))) / 2
    dense_s = taken(lambda: (own @ weight, grad @ weight.t(), own.t() @ grad)) / 3
    stream_s = taken(lambda: torch.add(own, grad))
    heads = x.view(-1, _HEADS, _WIDTH // _HEADS).clone().requires_grad_()

    def attention() -> None:
        scores = heads.sum(2)
        out = ops.attention(graph, heads, scores, scores[: graph.num_rows])
        torch.autograd.grad(out, heads, grad.view(-1, _HEADS, _WIDTH // _HEADS))

    read = graph.nnz * _WIDTH * 4 / 1e9
    return Rates(
        name="here",
        source=f"measured here, {'on ' + torch.cuda.get_device_name(device) if device.type == 'cuda' else 'on a CPU'}",
        sum_gbs=read / sum_s,
        attention_gbs=read / taken(attention),
        dense_tflops=2 * graph.num_rows * _WIDTH * _WIDTH / dense_s / 1e12,
        stream_gbs=3 * own.numel() * 4 / stream_s / 1e9,
        layer_us=taken(_tiny_layer(device), 20) * 1e6,
        asynchronous=device.type == "cuda",
        base_gib=_resident_gib(device),
    )


def _tiny_layer(device: torch.device) -> Callable[[], None]:
    """A layer on a graph that is next to nothing, forward and backward."""
    ends = torch.arange(8, device=device)
    tiny = Graph.from_coo(ends, ends.roll(1), num_rows=8, num_cols=8)
    weight, x = (torch.ones(8, 8, device=device, requires_grad=True) for _ in range(2))

    def step() -> None:
        F.relu(ops.spmm(tiny, F.linear(x, weight)) + x).sum().backward()

    return step


def _taken(run: Callable[[], object], device: torch.device, clock: Callable[[], float], rounds: int) -> float:
    """Seconds of a call."""
    times = []
    for _ in range(rounds + 1):
        _wait(device)
        start = clock()
        run()
        _wait(device)
        times.append(clock() - start)
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _resident_gib(device: torch.device) -> float:
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        return (whole - free - torch.cuda.memory_reserved(device)) / 2**30
    try:
        with open("/proc/self/status") as file:
            kib = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    except OSError:
        return 0.0
    return kib / 2**20
