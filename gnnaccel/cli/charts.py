"""Charts of a suite of comparisons, of the dictionary that results.json has: as SVG text and as PNG."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnnaccel.cli import output
from gnnaccel.cli.request import NAMES
from gnnaccel.cli.results import SIDES, Run

_BAR = 0.22  # inches


def _good(suite: dict[str, Any]) -> list[dict[str, Any]]:
    return [case for case in suite["cases"] if not case["error"]]


def _svg(draw: Callable[[Any], None], width: float, height: float, described: str) -> str:
    """What `draw` draws on a canvas of that many inches, as an SVG element that stands within HTML."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(width, height), layout="constrained")
    draw(canvas)
    text = io.StringIO()
    # Text stays text: smaller, and it can be searched and copied. No date: the same figures give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": described, "font.family": "sans-serif"}):
        canvas.savefig(text, format="svg", metadata={"Date": None, "Title": described})
    found = text.getvalue()
    return found[found.index("<svg") :].replace("<svg ", '<svg role="img" ', 1)


def relative(axes: Any, suite: dict[str, Any], figure: str, ratios: str, unit: str, title: str) -> None:
    """Bars of a figure relative to the framework alone, the figure itself written beside each."""
    cases, place, ticks, longest = _good(suite), 0.0, [], 1.0
    for case in cases:
        sides = list(case["sides"])
        ticks.append(
            (place + (len(sides) - 1) / 2, f"{NAMES[case['framework']]} {case['model']}, {case['dataset']['name']}")
        )
        for side in sides:
            value = case["sides"][side].get(figure)
            share = 1.0 if side == "alone" else 1 / case[ratios][side] if case[ratios].get(side) else None
            if value is not None and share is not None:
                axes.barh(place, share, height=0.9, color=output.COLOURS[side])
                ratio = "" if side == "alone" else f" ({1 / share:.2f}x)"
                text = f"{output.number(value, unit)} {unit}{ratio}"
                axes.annotate(text, (share, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
                longest = max(longest, share)
            place += 1
        place += 0.8
    axes.set(yticks=[at for at, _ in ticks], xlim=(0, 1.3 * longest), xlabel="relative to the framework alone")
    axes.set_yticklabels([text for _, text in ticks], fontsize=9)
    axes.set_title(title)
    axes.axvline(1, color="0.6", linewidth=0.8, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(place - 0.8, -0.8)  # the first on top


def where(suite: dict[str, Any]) -> str:
    """What ran it: the GPU, or the CPU and its threads."""
    if suite["gpu"] or suite["threads"] is None:  # None: no comparison came to an end
        return suite["gpu"] or suite["cpu"]
    return f"{suite['cpu']}, {suite['threads']} thread{'s' if suite['threads'] != 1 else ''}"


def _height(suite: dict[str, Any]) -> float:
    return 1.1 + _BAR * sum(len(case["sides"]) + 0.8 for case in _good(suite))


def _legend(canvas: Any, suite: dict[str, Any]) -> None:
    from matplotlib.patches import Patch

    there = {side for case in _good(suite) for side in case["sides"]}
    handles = [Patch(color=output.COLOURS[side], label=side.replace("_", ", ")) for side in SIDES if side in there]
    canvas.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def epoch_times(suite: dict[str, Any]) -> str:
    """Epoch times of all comparisons."""

    def draw(canvas: Any) -> None:
        relative(canvas.subplots(), suite, "epoch_time_median", "speedup", "ms", "epoch time, median")
        _legend(canvas, suite)

    return _svg(draw, 9, 0.3 + _height(suite), "epoch time")


def peak_memory(suite: dict[str, Any]) -> str:
    """Peak memory of all comparisons."""

    def draw(canvas: Any) -> None:
        relative(canvas.subplots(), suite, "peak_memory", "memory_ratio", "MiB", "peak memory, beyond data and model")
        _legend(canvas, suite)

    return _svg(draw, 9, 0.3 + _height(suite), "peak memory")


def shares(suite: dict[str, Any]) -> str:
    """Which part of the message-passing calls ran on gnnaccel, of all comparisons."""

    def draw(canvas: Any) -> None:
        axes, cases = canvas.subplots(), _good(suite)
        for place, case in enumerate(cases):
            share = case["sides"]["gnnaccel"]["share_accelerated"] or 0.0
            axes.barh(place, 100, height=0.7, color="0.9")
            axes.barh(place, 100 * share, height=0.7, color=output.COLOURS["gnnaccel"])
            axes.text(101, place, f"{share:.1%}", va="center", fontsize=8)
        axes.set(yticks=range(len(cases)), xticks=range(0, 101, 20), xlim=(0, 112), ylim=(len(cases) - 0.4, -0.6))
        axes.set_xlabel("% of message-passing calls")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_yticklabels(
            [f"{NAMES[case['framework']]} {case['model']}, {case['dataset']['name']}" for case in cases], fontsize=9
        )
        axes.set_title("calls on gnnaccel's kernels")

    return _svg(draw, 9, 1 + 0.28 * len(_good(suite)), "share of calls accelerated")


def curves(case: dict[str, Any]) -> str:
    """Epoch times and losses of all runs of one comparison, laid over each other."""

    def draw(canvas: Any) -> None:
        axes: Any = canvas.subplots(1, 2)
        runs = [Run(run["side"], run["pair"] - 1, run) for run in case["runs"]]
        output.draw_runs(axes[0], axes[1], runs, list(case["sides"]), case["warmup_epochs"], case["names"])
        axes[0].set_title("epoch time")
        axes[1].set_title("training loss")

    return _svg(draw, 9, 3.2, f"curves of {case['title']}")


def save_overview(path: Path, suite: dict[str, Any]) -> None:
    """Epoch times and memory of all comparisons, as PNG."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(14, 0.3 + _height(suite)), layout="constrained")
    axes: Any = canvas.subplots(1, 2)
    relative(axes[0], suite, "epoch_time_median", "speedup", "ms", "epoch time, median")
    relative(axes[1], suite, "peak_memory", "memory_ratio", "MiB", "peak memory, beyond data and model")
    axes[1].set_yticklabels([])
    _legend(canvas, suite)
    canvas.suptitle(where(suite))
    canvas.savefig(path, dpi=110)
