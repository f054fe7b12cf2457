"""What training on parts would take on so many GPUs: time of an epoch and memory of each, by counts of work and rates.

An epoch is a sum: products of matrices (floating point operations over a rate), sums over edges and attention (rows
that edges read, in bytes, over a rate), passes over rows of nodes, and exchanges (rows that a part sends or receives,
in bytes, over the link's rate). Counts are those of the layers in `gnnaccel.pyg_backend.parts`, with Adam in float32;
the slowest part counts. Nothing is taken to overlap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.parts.assign import assign
from gnnaccel.parts.rates import Rates

MODELS = ("gcn", "sage", "gin", "gat")
_FLOAT = torch.float32.itemsize


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of `layers` layers of PyG's, ReLU between them.

    kind : {"gcn", "sage", "gin", "gat"}; heads : of gat, whose hidden layers are `hidden` wide with all of them.
    """

    kind: str
    feats: int
    hidden: int
    layers: int
    classes: int
    heads: int = 1

    def widths(self) -> list[tuple[int, int]]:
        """Features into and out of each layer."""
        last = self.classes * (self.heads if self.kind == "gat" else 1)
        inner = [self.hidden] * (self.layers - 1)
        return list(zip([self.feats, *inner], [*inner, last], strict=True))

    def parameters(self) -> int:
        """How many numbers are learned, biases left out."""
        maps = {"gcn": 1, "sage": 2, "gin": 1, "gat": 1}[self.kind]
        return sum(maps * i * o + (o * o if self.kind == "gin" else 0) for i, o in self.widths())


@dataclasses.dataclass(frozen=True)
class Cut:
    """Sizes of parts: nodes, in-edges, rows that each receives, and that each sends, in an exchange."""

    nodes: Sequence[float]
    edges: Sequence[float]
    halo: Sequence[float]
    sent: Sequence[float]

    def scaled(self, nodes: float, edges: float) -> Cut:
        """The cut of a graph with so many times the nodes and edges, and as many halo rows per node."""
        of_nodes = ([n * nodes for n in values] for values in (self.nodes, self.halo, self.sent))
        own, halo, sent = of_nodes
        return Cut(own, [e * edges for e in self.edges], halo, sent)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What an epoch would take on so many GPUs.

    compute_ms, exchange_ms : of the slowest part, and their sum epoch_ms; speedup : over one GPU
    mib_sent : by all parts in an epoch, gradients included
    halo_rows : that an exchange sends, over all parts
    memory_gib : of the largest part; fits : whether that is within what a GPU has
    """

    gpus: int
    epoch_ms: float
    compute_ms: float
    exchange_ms: float
    speedup: float
    halo_rows: int
    mib_sent: float
    memory_gib: float
    fits: bool


def cut_of(graph: Graph, parts: int, method: str) -> Cut:
    """Sizes of the parts that `assign` would make."""
    label = assign(graph, parts, method)
    rows = torch.repeat_interleave(torch.arange(graph.num_rows, device=graph.device), graph.indptr.diff().long())
    to, cols = label[rows], graph.indices.long()
    across = label[cols] != to
    pairs = torch.unique(cols[across] * parts + to[across])  # a node, and a part that needs it
    receives, sends = pairs % parts, label[torch.div(pairs, parts, rounding_mode="floor")]
    return Cut(*(_counts(x, parts) for x in (label, to, receives, sends)))


def _counts(label: Tensor, parts: int) -> list[float]:
    return torch.bincount(label, minlength=parts).double().tolist()


def estimate(
    cuts: Sequence[Cut], model: Model, rates: Rates, *, memory_gib: float, link_gbs: float, latency_us: float
) -> list[Estimate]:
    """What an epoch takes on each of these cuts; the speedup is over the first.

    Parameters
    ----------
    memory_gib, link_gbs : float
        Of a GPU; GB/s that it sends, and at the same time receives, in an exchange.
    latency_us : float
        What an exchange takes beyond its bytes.
    """
    done: list[Estimate] = []
    for cut in cuts:
        compute = max(_compute_ms(model, rates, part) for part in _parts(cut))
        exchange, sent = _exchange(cut, model, rates, link_gbs, latency_us)
        memory = max(_memory(model, part) for part in _parts(cut)) / 2**30 + rates.base_gib
        epoch = compute + exchange
        done.append(
            Estimate(
                gpus=len(cut.nodes),
                epoch_ms=epoch,
                compute_ms=compute,
                exchange_ms=exchange,
                speedup=(done[0].epoch_ms if done else epoch) / epoch,
                halo_rows=round(sum(cut.halo)),
                mib_sent=sent / 2**20,
                memory_gib=memory,
                fits=memory <= memory_gib,
            )
        )
    return done


def _parts(cut: Cut) -> list[tuple[float, float, float]]:
    return list(zip(cut.nodes, cut.edges, cut.halo, strict=True))


def _compute_ms(model: Model, rates: Rates, part: tuple[float, float, float]) -> float:
    own, edges, halo = part
    every, flops, summed, attended, passed = own + halo, 0.0, 0.0, 0.0, 0.0
    for at, (i, o) in enumerate(model.widths()):
        # A product, and those of its gradients: of the weights, and of what goes in, which features have none of.
        first, products = at == 0, 2 if at == 0 else 3
        if model.kind == "gcn":
            flops += 2 * (every if first else own) * i * o * products
            summed += 2 * edges * o
        elif model.kind == "sage":
            flops += 2 * 2 * own * i * o * products
            summed += edges * i if first else 2 * edges * min(i, o)
        elif model.kind == "gin":
            flops += 2 * own * (i * o * products + o * o * 3)
            summed += edges * i * (1 if first else 2)
        else:
            flops += 2 * (every + own) * i * o * products
            attended += edges * o
        passed += bounds.ESTIMATED_PASSES * own * o
    passed += 8 * model.parameters()  # Adam
    seconds = flops / (rates.dense_tflops * 1e12)
    seconds += _FLOAT / 1e9 * (summed / rates.sum_gbs + attended / rates.attention_gbs + passed / rates.stream_gbs)
    host_ms = model.layers * rates.layer_us / 1e3
    return max(seconds * 1e3, host_ms) if rates.asynchronous else seconds * 1e3 + host_ms


def _exchanged(model: Model) -> list[int]:
    """Features of the rows that layers exchange, forward, and as many back; the first layer's are fetched once."""
    later = model.widths()[1:]
    return [{"gcn": o, "sage": min(i, o), "gin": i, "gat": i}[model.kind] for i, o in later]


def _exchange(cut: Cut, model: Model, rates: Rates, link_gbs: float, latency_us: float) -> tuple[float, float]:
    """Milliseconds of an epoch's exchanges and of the gradients' sum; bytes that all parts send in the exchanges."""
    if len(cut.nodes) == 1:
        return 0.0, 0.0
    rows = max(max(pair) for pair in zip(cut.halo, cut.sent, strict=True))
    widths = _exchanged(model)
    numbers = 2 * sum(widths) * _FLOAT  # bytes of a row of each exchange, forward and back
    seconds = rows * numbers * (1 / link_gbs + bounds.ESTIMATED_PACKING / rates.stream_gbs) / 1e9
    seconds += 2 * _FLOAT * model.parameters() / (link_gbs * 1e9)
    seconds += (2 * len(widths) + 2) * latency_us / 1e6  # the loss and the gradients are summed up
    return seconds * 1e3, sum(cut.halo) * numbers


def _memory(model: Model, part: tuple[float, float, float]) -> float:
    """Bytes: structure, features and their halo, what layers keep for the backward, what is there for a moment."""
    own, edges, halo = part
    every, kept = own + halo, 0.0
    for i, o in model.widths():
        if model.kind == "gcn":
            kept += own * o
        elif model.kind == "sage":
            kept += own * (i + o)
        elif model.kind == "gin":
            kept += own * (i + 2 * o)
        else:
            kept += every * (i + o) + own * 3 * o
    features = own * model.feats + (every * model.feats if halo else 0)
    moment = bounds.ESTIMATED_ROWS * every * max(o for _, o in model.widths())
    numbers = features + kept + moment + 4 * model.parameters()
    return numbers * _FLOAT + edges * bounds.ESTIMATED_EDGE_BYTES[model.kind] + own * bounds.ESTIMATED_NODE_BYTES
