"""benchmarks/epochs.py calls a side wrong whose losses differ, or that has an error which the side alone has not."""

import math
from pathlib import Path

import pytest


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    import epochs_table

    return epochs_table


def turn(*losses):
    return {"epoch_ms": 1.0, "iqr_ms": 0.0, "first_ms": 2.0, "peak_mib": None, "losses": list(losses)}


@pytest.mark.parametrize(
    ("side", "losses", "problem", "alone", "expected"),
    [
        ("flag", [(3.0, 2.0)], "", "", ""),
        ("flag", [(3.0, 2.001)], "", "", ""),
        ("flag", [(3.0, 2.01)], "", "", "losses differ by 0.005"),
        ("flag", [(3.0, 2.0), (3.3, 2.0)], "", "", "losses differ by 0.1"),
        ("flag", [(3.0, math.nan)], "", "", "losses differ by nan"),
        ("flag", [(3.0,)], "", "", ""),
        ("compiled", [(3.3, 2.0)], "", "", "losses differ by 0.1"),
        ("flag", [], "exit code -11", "", "exit code -11"),
        ("flag", [], "out of memory", "out of memory", ""),
        ("flag", [], "timed out", "", ""),
        ("compiled", [], "Unsupported", "", ""),
        ("dgl-flag", [], "exit code -11", "", "exit code -11"),
        ("dgl-flag", [(3.0, 2.0)], "turn 2: exit code 1", "", "turn 2: exit code 1"),
    ],
)
def test_judge(table, side, losses, problem, alone, expected):
    base = table.Outcome(turns=[] if alone else [turn(3.0, 2.0)], problem=alone)
    outcome = table.Outcome(turns=[turn(*each) for each in losses], problem=problem)
    lines = table.judge({("pyg", "cora/gcn"): base, (side, "cora/gcn"): outcome})
    assert lines == ([f"{side} cora/gcn: {expected}"] if expected else [])
    assert outcome.failed == bool(expected) and not base.failed


def test_summary_leaves_out_large_graphs_and_what_was_not_measured(table):
    cases = [
        table.Case("a", "gcn", "", 10, 20),
        table.Case("b", "gcn", "", 10, 20),
        table.Case("c", "gcn", "", 10, table.SMALL + 1),
        table.Case("d", "gcn", "", 10, 20),
    ]
    times = {"pyg": (1.0, 1.0, 1.0, 1.0), "flag": (0.5, 2.0, 9.0, None)}
    outcomes = {
        (side, case.name): table.Outcome(turns=[turn(1.0) | {"epoch_ms": ms}] if ms else [])
        for side, row in times.items()
        for case, ms in zip(cases, row, strict=True)
    }
    (line,) = table.summary(outcomes, cases, ["pyg", "flag"])
    assert line.startswith(
        "flag over pyg, small graphs: 1.000x in geometric mean of 2, 0.50 to 2.00 (b/gcn), 1 above 1"
    )
