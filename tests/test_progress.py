"""How far a long run is: nothing of short ones, a line on a terminal, else the log now and then."""

from __future__ import annotations

import io
import logging

import pytest
import torch

from gnnaccel.graph import community, progress
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds, which pass only as the test says."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(progress.time, "perf_counter", lambda: Clock.now)
    return Clock


def run(clock, seconds):
    with progress.shown("a run") as say:
        for at in seconds:
            clock.now = at
            say(f"at {at}")


@pytest.mark.parametrize(
    ("seconds", "want"),
    [((0, 1.9), []), ((0, 5, 10, 15, 20, 25), ["a run: at 10", "a run: at 20"]), ((30,), ["a run: at 30"])],
)
def test_log(seconds, want, clock, caplog, monkeypatch):
    monkeypatch.setattr(progress.sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO, logger="gnnaccel"):
        run(clock, seconds)
    assert [record.message for record in caplog.records] == [f"gnnaccel: {line}" for line in want]
    assert progress.sys.stderr.getvalue() == ""


def test_terminal(clock, caplog, monkeypatch):
    """Shown from the third second on, and gone at the end, whatever ended it."""
    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    run(clock, (0, 1))
    assert terminal.getvalue() == ""
    with pytest.raises(KeyboardInterrupt), progress.shown("[a] run") as say:
        clock.now = 4.0
        say("50%")
        raise KeyboardInterrupt
    text = terminal.getvalue()
    assert "gnnaccel: [a] run: 50%" in text and text.endswith("\x1b[2K") and not caplog.records


def test_communities_say_where_they_are(monkeypatch, caplog):
    monkeypatch.setattr(bounds, "PROGRESS_QUIET_S", 0.0)
    monkeypatch.setattr(bounds, "PROGRESS_LOG_S", 0.0)
    monkeypatch.setattr(progress.sys, "stderr", io.StringIO())
    rows, cols = torch.randint(300, (2, 3000), generator=torch.Generator().manual_seed(0))
    with caplog.at_level(logging.INFO, logger="gnnaccel"):
        community.communities(Graph.from_coo(rows, cols, num_rows=300, num_cols=300))
    assert "level 1, 300 nodes, pass 1 of at most 5, 0%" in caplog.records[0].message
    assert "nnz=3000" in caplog.records[0].message
