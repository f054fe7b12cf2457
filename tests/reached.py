"""Whether tests reach what they name: how many calls were accelerated, with every bound at 0 that leaves small ones.

Small calls are left to the framework, and those of tests are small: a test of what the plug-ins do to messages would
compare the framework with itself. `Counted` sets the bounds, counts, and fails where too much was left:

    with Counted("a fuzzer") as counted:
        for seed in range(100):
            with counted.case() as case:
                case.expected = run(seed)

The mark `pytest.mark.reached` does so with a test as the one case; ``reached(kinds="first rows")`` counts calls of such
kinds alone. What cannot be accelerated by design says why (`Left`, `by_design`), and is counted by itself: as large a
share of it must be left, and for that reason.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gnnaccel import report
from gnnaccel.lower import bounds

SHARE = 0.9  # of calls that must go as expected, and of cases in which there must be a call
REFUSED_SHARE = 0.25  # of cases that the framework may refuse
# What leaves small calls to a framework, or to another way of ours, and what it is set to.
BOUNDS: dict[str, Any] = {"FEW_MESSAGES": {}, "FEW_AT_FIRST": {}, "SAMPLED_PRODUCTS": 0, "FEW_COMPILED": 0}
SMALL = r"\bfew (messages|products)\b"  # in the reasons that such a bound gives
REFUSED = "refused"  # what is expected of a case that the framework itself does not run
_FIRST_ROWS = "pyg.first rows"
_FUNCTIONS = ("dgl.message function", "dgl.reduce function")


@contextlib.contextmanager
def bounded(values: dict[str, Any]) -> Iterator[None]:
    """Other values of such bounds."""
    before = {name: getattr(bounds, name) for name in values}
    vars(bounds).update(values)
    try:
        yield
    finally:
        vars(bounds).update(before)


@dataclass(frozen=True)
class Left:
    """Calls that are left by design.

    reason : pattern that is found in the reason why.
    some : only some of them are, the others are accelerated.
    """

    reason: str
    some: bool = False


@dataclass
class Calls:
    """How calls of message passing went.

    accelerated : on our kernels, with no row for each edge made by the framework's code.
    missed : left to the framework, or with messages that its code makes and ours reduces.
    reasons : why, and how often.
    """

    accelerated: int = 0
    missed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All calls."""
        return self.accelerated + self.missed

    def add(self, other: Calls) -> None:
        """Count those of `other` too."""
        self.accelerated += other.accelerated
        self.missed += other.missed
        self.reasons += other.reasons

    def because(self, pattern: str) -> int:
        """How many were missed for a reason in which `pattern` is found."""
        return min(self.missed, sum(n for reason, n in self.reasons.items() if re.search(pattern, reason)))


def calls_of(sites: dict[str, report.Site], kinds: str = "") -> Calls:
    """The calls in a report's counters, of kinds in which the pattern is found."""
    found = Calls()
    for kind, site in sites.items():
        if not re.search(kinds, kind):
            continue
        accelerated, missed = site.accelerated, site.left
        if kind.endswith(" segment"):  # the framework makes the messages
            accelerated, missed = 0, missed + accelerated
        elif kind == _FIRST_ROWS:  # that nobody may take a model's first rows is noted, and the call not counted
            whole = sum(n for reason, n in site.reasons.items() if reason.startswith("all rows of some layers"))
            accelerated, missed = accelerated - whole, sum(site.reasons.values())
        elif kind in _FUNCTIONS:  # accelerated with a reason: some of its messages are made
            partly = sum(site.reasons.values()) - site.left
            accelerated, missed = accelerated - partly, missed + partly
        reasons = {f"{kind}: {reason}": n for reason, n in site.reasons.items()} if missed else {}
        found.add(Calls(accelerated, missed, Counter(reasons)))
    return found


@dataclass
class Case:
    """One case: `expected` is None for calls of ours, `Left`, or REFUSED."""

    expected: Left | str | None = None


class Counted:
    """A context with all bounds at 0, at whose end nine tenths of the calls must have gone as expected.

    Parameters
    ----------
    what : str
        What is counted, for messages.
    kinds : str
        Pattern of the call site kinds that are.

    Attributes
    ----------
    ours, others : Calls
        Those that are to be accelerated, and those that are left by design.
    as_designed : int
        Of the latter, those that were left for the reason given.
    cases, empty, refused : int
        All cases, those without a call, and those that the framework does not run.
    """

    now: Counted | None = None  # the innermost one

    def __init__(self, what: str, kinds: str = ""):
        self.what, self.kinds = what, kinds
        self.ours, self.others = Calls(), Calls()
        self.as_designed = self.cases = self.empty = self.refused = 0
        self._wrong = Counter[str]()  # what the others should have been left for, and were not
        self._some: list[int] = []  # of each `some`, how many were left
        self._calls = Calls()  # of this case
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Counted:
        self._stack.enter_context(bounded(BOUNDS))
        self._reset: Callable[[], None] = report.reset
        report.reset = self._bank  # what a test forgets is counted all the same
        self._stack.callback(setattr, report, "reset", self._reset)
        self._stack.callback(setattr, Counted, "now", Counted.now)
        Counted.now = self
        self._reset()
        return self

    def __exit__(self, kind, *error) -> None:
        self._stack.close()
        if kind is None:
            self.check()

    def _bank(self) -> None:
        self._calls.add(calls_of(report.snapshot(), self.kinds))
        self._reset()

    @contextlib.contextmanager
    def case(self) -> Iterator[Case]:
        """One case, of which may be said what is expected until it is over. One that raises is none."""
        before = self.ours.total + self.others.total
        given = Case()
        with self.part(given):
            yield given
        self.cases += 1
        if given.expected == REFUSED:
            self.refused += 1
        elif self.ours.total + self.others.total == before:
            self.empty += 1

    @contextlib.contextmanager
    def part(self, given: Case) -> Iterator[None]:
        """Count what runs meanwhile as is expected of `given`."""
        self._bank()
        outer, self._calls = self._calls, Calls()
        try:
            yield
            self._bank()
            self._count(self._calls, given.expected)
        finally:
            self._calls = outer

    def _count(self, calls: Calls, expected: Left | str | None) -> None:
        if isinstance(expected, Left):
            left = calls.because(expected.reason)
            if expected.some:
                self._some.append(left)
            fitting = left + calls.accelerated * expected.some
            self.others.add(calls)
            self.as_designed += fitting
            if fitting < calls.total:
                self._wrong[f"not left because of {expected.reason!r}"] += calls.total - fitting
        elif expected != REFUSED:
            self.ours.add(calls)

    def shares(self) -> str:
        """What was counted, in a line."""
        return (
            f"{self.what}: {self.ours.accelerated} of {self.ours.total} calls accelerated; {self.as_designed} of "
            f"{self.others.total} left by design; of {self.cases} cases {self.empty} without a call, "
            f"{self.refused} refused"
        )

    def check(self) -> None:
        """Raises AssertionError, with the most frequent reasons, where too few calls went as expected."""
        reasons, fault = self.ours.reasons, ""
        if self.ours.accelerated < SHARE * self.ours.total:
            fault = "fewer than nine tenths were accelerated"
        elif self.ours.because(SMALL):
            fault = "small calls were left"
        elif self.as_designed < SHARE * self.others.total or (self._some and not any(self._some)):
            fault, reasons = "what is left by design went otherwise", self._wrong + self.others.reasons
        elif not self.cases or self.empty > (1 - SHARE) * self.cases:
            fault = "there are cases without a call"
        elif self.refused > REFUSED_SHARE * self.cases:
            fault = "the framework refuses too many cases"
        why = "".join(f"\n  {count}x {reason}" for reason, count in reasons.most_common(6))
        assert not fault, f"{fault}. {self.shares()}{why}"


@contextlib.contextmanager
def by_design(reason: str | None, some: bool = False) -> Iterator[None]:
    """Calls in a test with the mark that are `Left`; None: as all others."""
    if reason is None or Counted.now is None:
        yield
    else:
        with Counted.now.part(Case(Left(reason, some))):
            yield
