"""What the plug-in accelerates of DGL, found by running each case of tests/dgl_cases.py once with the plug-in enabled.

`dgl_rows()` gives the rows of the DGL section of docs/coverage.md; run as a program, it prints them.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from gnnaccel.lower import bounds

_TESTS = Path(__file__).resolve().parent.parent / "tests"


def dgl_rows(only: set[str] | None = None) -> list[tuple[str, str, str, str]]:
    """(group, name, status, reason) for each case (or those in `only`), by what gnnaccel.report saw, in table order.

    status is "accelerated", "partly" (the reason names what DGL ran) or "framework". Where the report saw no message
    passing at all, the reason is the table's; a case that fails raises its error.
    """
    if str(_TESTS) not in sys.path:
        sys.path.insert(0, str(_TESTS))
    from dgl_cases import CASES, OUTSIDE
    from dgl_compare import FRAMEWORK, outcome, status

    from gnnaccel import dgl_backend, report

    rows = []
    few, bounds.FEW_MESSAGES = bounds.FEW_MESSAGES, {}  # the cases' graphs are as small as those that are left to DGL
    dgl_backend.enable()
    try:
        for name, case in CASES.items():
            if only is not None and name not in only:
                continue
            report.reset()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome(*case.bind(case.graphs[0]), grad=False)
            what, why = status(report.snapshot())
            rows.append((case.group, name, what, why or case.reason))
    finally:
        bounds.FEW_MESSAGES = few
        dgl_backend.disable()
        report.reset()
    rows += [("not run", name, FRAMEWORK, reason) for name, reason in OUTSIDE.items()]
    return rows


if __name__ == "__main__":
    for row in dgl_rows():
        print(" | ".join(row))
