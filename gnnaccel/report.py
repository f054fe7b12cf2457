"""What ran where, and why not: counters for ``--profile``, one log line per kind of fallback.

A call site kind is a short name such as ``"dgl.copy_u.sum"`` or ``"pyg.GCNConv"``. Backends call `accelerated`
around what ran on our kernels and `fallback` for what was left to the framework.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

log = logging.getLogger("gnnaccel")


@dataclass
class Site:
    """Counters of one call site kind.

    accelerated : calls that our kernels ran. stored : those of them for which part of the work was not ours, as one
        message was stored for each edge.
    time_ms : wall time of the calls, kept only while `timing` is on; of one within another, in both.
    backward_ms : that of our derivatives of what ran in them, in no call twice.
    reasons : why calls were left, or, of a kind with none left, why part of their work was not ours.
    """

    accelerated: int = 0
    stored: int = 0
    left: int = 0
    time_ms: float = 0.0
    backward_ms: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)


_lock = threading.Lock()
_sites: dict[str, Site] = {}
_messages: dict[str, int] = {}  # programs that ran as one kernel, in words
_ages: dict[str, int] = {}  # calls of kernels by how often their graph was used, under `timing`
on_call: Callable[[], None] | None = None  # called at every call that is counted, inside of it
timing = False  # set by `time_calls`: CUDA calls are timed on the host, without synchronising
on_timing: list[Callable[[bool], None]] = []  # what follows `timing`
OPS = "gnnaccel.ops"  # the kind of what ran in no call that is counted: a program's own calls of ops, gnnaccel.nn


class _Thread(threading.local):
    """derivatives: those of this thread that await the end of the call they belong to, as they were made.
    differentiating: how many are running."""

    def __init__(self):
        self.derivatives: deque[Derivative] = deque(maxlen=4096)  # of what belongs to none, the newest
        self.differentiating = 0


_thread = _Thread()


class Derivative:
    """A node of autograd's graph, made now on this thread, while a call that is counted runs. As a context: its run."""

    __slots__ = ("_start", "made", "site")

    def __init__(self) -> None:
        self.made = time.perf_counter()
        self.site: Site | None = None
        _thread.derivatives.append(self)

    def __enter__(self) -> None:
        _thread.differentiating += 1
        self._start = time.perf_counter()

    def __exit__(self, *exception) -> None:
        taken = time.perf_counter() - self._start
        _thread.differentiating -= 1
        if not _thread.differentiating:  # else it is part of the one that runs
            (self.site or _site(OPS)).backward_ms += taken * 1e3


def time_calls(on: bool) -> None:
    """Keep the times of calls and of their derivatives from now on, or no longer: what --profile asks for."""
    global timing
    timing = on
    for follow in on_timing:
        follow(on)


def _timed(site: Site, start: float) -> None:
    """A call that began at `start` is done: what was made meanwhile, and belongs to no call in it, is its own."""
    site.time_ms += (time.perf_counter() - start) * 1e3
    waiting = _thread.derivatives
    while waiting and waiting[-1].made >= start:
        waiting.pop().site = site


def _site(kind: str) -> Site:
    site = _sites.get(kind)
    if site is None:
        with _lock:
            site = _sites.setdefault(kind, Site())
    return site


def count(kind: str) -> None:
    """Count one accelerated call of `kind`."""
    _site(kind).accelerated += 1
    if on_call is not None:
        on_call()


def record(kind: str, start: float, reason: str | None = None, stored: bool = False) -> None:
    """Count one accelerated call of `kind` that began at `start` (time.perf_counter()) and is done.

    For a caller that learns only on the way whether it can accelerate the call, or (`reason`) why not all of it;
    stored: one message was stored for each edge.
    """
    site = _sites.get(kind) or _site(kind)
    site.accelerated += 1
    site.stored += stored
    if on_call is not None:
        on_call()
    if reason is not None:
        site.reasons[reason] = site.reasons.get(reason, 0) + 1
    if timing:
        _timed(site, start)


class accelerated:
    """Count one accelerated call of `kind` and, under --profile, its times."""

    __slots__ = ("_site", "_start")

    def __init__(self, kind: str):
        site = self._site = _sites.get(kind) or _site(kind)
        site.accelerated += 1
        if on_call is not None:
            on_call()

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exception) -> None:
        if timing:
            _timed(self._site, self._start)


def fallback(kind: str, reason: str) -> None:
    """Count one call of `kind` left to the framework because of `reason`; logged the first time."""
    site = _site(kind)
    site.left += 1
    if on_call is not None:
        on_call()
    seen = site.reasons.get(reason, 0)
    site.reasons[reason] = seen + 1
    if not seen:
        log.info("%s is left to the framework: %s", kind, reason)


def note(kind: str, reason: str, level: int = logging.INFO) -> None:
    """Keep why part of what calls of `kind` do is not as it was asked for; logged the first time."""
    reasons = _site(kind).reasons
    seen = reasons.get(reason, 0)
    reasons[reason] = seen + 1
    if not seen:
        log.log(level, "%s: %s", kind, reason)


def age(word: str) -> None:
    """Count, where calls are timed, a use of a graph that is "new", "used" or "lasting"."""
    _ages[word] = _ages.get(word, 0) + 1


def message(words: str) -> None:
    """Count one run of a program of messages; for who asks while `timing` is on."""
    _messages[words] = _messages.get(words, 0) + 1


def snapshot() -> dict[str, Site]:
    """The counters so far, by call site kind."""
    return {kind: replace(s, reasons=dict(s.reasons)) for kind, s in sorted(_sites.items())}


def reset() -> None:
    """Forget all counters."""
    _sites.clear()
    _messages.clear()
    _ages.clear()
    _thread.derivatives.clear()


def _passing() -> list[Site]:
    """Of calls of message passing: not of whole steps and models, in which these are."""
    return [site for kind, site in _sites.items() if not kind.startswith("captured.")]


def share() -> float:
    """Share of message-passing calls that were accelerated and stored no messages, 0 to 1 (1 when there was none)."""
    total = sum(s.accelerated + s.left for s in _passing())
    return sum(s.accelerated - s.stored for s in _passing()) / total if total else 1.0


def to_dict() -> dict:
    """The counters as plain data: {"version", "share", "sites": {kind: {accelerated, stored, left, time_ms,
    backward_ms, reasons}}, "messages": {program in words: runs}, "graphs": {"new", "used", "lasting": uses}}."""
    from gnnaccel import __version__

    return {
        "version": __version__,
        "share": share(),
        "sites": {kind: asdict(site) for kind, site in snapshot().items()},
        "messages": dict(_messages),
        "graphs": dict(_ages),
    }


def save(path: str | os.PathLike) -> None:
    """Write `to_dict` to `path` as JSON. Raises OSError where that is not possible."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(to_dict(), file, indent=1)


def table() -> str:
    """The counters as a table with one row per call site kind; reasons stand below their kind."""
    header = ("call site kind", "accelerated", "stored", "left to the framework", "forward ms", "backward ms")
    rows = []
    for kind, site in snapshot().items():
        time_ms = f"{site.time_ms:.1f}" if site.accelerated else ""  # what is left is not timed
        backward_ms = f"{site.backward_ms:.1f}" if site.backward_ms else ""
        counts = (
            ("", "", "") if kind == OPS else (str(site.accelerated - site.stored), str(site.stored), str(site.left))
        )
        rows.append((kind, *counts, time_ms, backward_ms))
        rows += [(f"  {count}x {reason}", "", "", "", "", "") for reason, count in sorted(site.reasons.items())]
    if not rows:
        return "gnnaccel: no message passing was seen"
    total = sum(s.accelerated + s.left for s in _passing())
    title = f"gnnaccel: {share():.1%} of {total} calls accelerated"
    widths = [max(len(row[i]) for row in (header, *(r for r in rows if i or any(r[1:])))) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    programs = [f"  {count}x {words}" for words, count in sorted(_messages.items())]
    if programs:
        programs = ["messages that ran as one kernel (docs/messages.md)", *programs, rule]
    ages = [f"{count} on {word} ones" for word, count in sorted(_ages.items())]
    if ages:
        programs = [*programs, "uses of graphs that were counted (GNNACCEL_AGE): " + ", ".join(ages), rule]
    return "\n".join((title, rule, lines[0], rule, *lines[1:], rule, *programs))
