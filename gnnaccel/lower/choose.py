"""Which way a call goes, of those that depend on its size, on how often its graph was used, and on a capture.

Three questions, asked of numbers alone: are messages so few that the framework's own code makes them the quicker
(`are_few`); may a graph be gone after this step (`is_new`), so that nothing is made for later calls; has it lasted
(`lasts`), so that what costs a walk over its edges is repaid. `GNNACCEL_AGE` fixes the last two answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gnnaccel import report, settings
from gnnaccel.lower import bounds

fixed = settings.value("GNNACCEL_AGE")
"""What all graphs are taken for: "new", "lasting", or "" for what they are."""
_captured = False  # within `lasting`


class Age:
    """How often a graph, or edges that one is made of, was used by an op.

    uses : calls so far; of a graph of either direction those by its own rows.
    """

    __slots__ = ("uses",)

    def __init__(self) -> None:
        self.uses = 0

    def use(self) -> None:
        """Count a call."""
        if report.timing:
            report.age("new" if is_new(self) else "lasting" if lasts(self) else "used")
        self.uses += 1


def age_of(graph: Any) -> Age:
    """The age of a `Graph`, kept with it."""
    known: Age | None = getattr(graph.slots, "age", None)
    return graph.slot("age", Age) if known is None else known


def is_new(age: Age) -> bool:
    """True for a graph that may be of a sampled batch, gone after its step."""
    if _captured or fixed:
        return not _captured and fixed == "new"
    return age.uses < max(1, bounds.NEW_GRAPH_USES)  # what was never used is new


def lasts(age: Age) -> bool:
    """True for a graph that has proved to last, or is to be captured."""
    if _captured or fixed:
        return _captured or fixed == "lasting"
    return age.uses >= bounds.LASTING_USES


def earns(age: Age, since: int) -> bool:
    """True where what was not made for a graph when it had been used `since` times should be asked for again: once the
    graph lasts, and now and then after that, as it may have been refused; at once for a capture."""
    if _captured:
        return True
    lately = since >= bounds.LASTING_USES or bool(fixed)
    return lasts(age) and (not lately or age.uses - since >= bounds.LASTING_USES)


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """What runs in here is to be captured in a CUDA graph: graphs get their lists at once, and the host's time is no
    reason for anything."""
    global _captured
    before, _captured = _captured, True
    try:
        yield
    finally:
        _captured = before


def is_lasting() -> bool:
    """True within `lasting`."""
    return _captured


def may_be_few() -> bool:
    """False where nothing is few: within `lasting`, and where sums are to have one order."""
    return not _captured and not torch.are_deterministic_algorithms_enabled()


def are_few(
    *, device: str, edges: int, width: float, nodes: int = 0, first: bool = False, compiled: bool = False, side: int = 0
) -> bool:
    """True if messages of `width` numbers are so few that a framework's own code makes them the quicker.

    device : its type. On CUDA torch's own sums have no order, so that none are few where one is asked for; nor are
        they where a capture leaves the host out.
    nodes : that the edges go to, 0 if that does not matter.
    first : of edges that a layer sees for the first time, which would have to be sorted for one use perhaps.
    side : then, the longest side of the layer's weights, which may make features wider before they are gathered.
    compiled : in a program that torch.compile makes, where Inductor writes them.
    """
    if device == "cuda" and torch.are_deterministic_algorithms_enabled():
        return False
    numbers = edges * width
    if compiled:  # read by Dynamo, which would compile anew for a capture
        return numbers <= bounds.FEW_COMPILED
    if _captured:
        return False
    if first:
        most = bounds.FEW_AT_FIRST.get(device, 0)
        return numbers <= most and edges * side <= bounds.WIDENED_AT_FIRST * most
    most = bounds.FEW_MESSAGES.get(device, 0)
    return numbers <= (2 * most if device == "cpu" and edges <= bounds.SHORT_ROWS * nodes else most)
