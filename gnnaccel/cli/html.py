"""One self-contained HTML page of a suite of comparisons: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gnnaccel.cli import baseline, charts, output
from gnnaccel.cli.request import NAMES

_TEMPLATE = Path(__file__).parent / "report.html.jinja"


def render(suite: dict[str, Any], changes: baseline.Changes | None = None) -> str:
    """The page.

    Parameters
    ----------
    suite : dict
        As in results.json.
    changes : Changes, optional
        What differs from an earlier one.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = output.number
    environment.filters["side"] = lambda side: side.replace("_", ", ")
    good = [case for case in suite["cases"] if not case["error"]]
    overview = [draw(suite) for draw in (charts.epoch_times, charts.peak_memory, charts.shares)] if good else []
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        suite=suite,
        changes=changes,
        frameworks=NAMES,
        sides=list(dict.fromkeys(side for case in good for side in case["sides"])),
        good=[(case, Markup(charts.curves(case))) for case in good],
        failed=[case for case in suite["cases"] if case["error"]],
        overview=[Markup(chart) for chart in overview],
    )
