"""A report of `gnnaccel compare --suite` beside an earlier one: what got slower or quicker, what is not comparable."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnaccel.cli.children import Failed

# Options that make another training of it: of such comparisons no times are compared.
OPTIONS = ("hidden", "heads", "layers", "dropout", "maxk", "threads")
OF_BATCHES = ("sample", "batch_size")  # which earlier reports may lack
_WHERE = ("cpu", "cores", "gpu", "threads")
_MORE = 1.1  # times: less than that is not told from the scatter of a machine


@dataclass(frozen=True)
class Change:
    """One figure of one side then and now. ratio: now / then."""

    case: str
    side: str
    what: str
    unit: str
    then: float
    now: float

    @property
    def ratio(self) -> float:
        return self.now / self.then

    def __str__(self) -> str:
        side = self.side.replace("_", ", ")
        return (
            f"{self.case}, {side}: {self.what} {self.then:.4g} then, {self.now:.4g} {self.unit} now ({self.ratio:.2f}x)"
        )


@dataclass(frozen=True)
class Changes:
    """What `compare` found. same: how many figures are within the scatter; differs: of the machines and versions."""

    file: str
    worse: tuple[Change, ...]
    better: tuple[Change, ...]
    same: int
    not_compared: tuple[str, ...]
    differs: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """As it is printed."""
        yield f"compared with {self.file}:"
        for text in self.differs:
            yield f"  not the same: {text}"
        for change in self.worse:
            yield f"  MORE: {change}"
        for change in self.better:
            yield f"  less: {change}"
        for text in self.not_compared:
            yield f"  not compared: {text}"
        yield f"  {len(self.worse)} more, {len(self.better)} less, {self.same} within a tenth or their scatter"


def read(path: Path) -> dict[str, Any]:
    """An earlier results.json.

    Raises
    ------
    Failed
        With exit code 2 if it is not one.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Failed(f"--baseline: {str(path)!r}: {error.strerror}", code=2) from None
    except ValueError as error:
        raise Failed(f"--baseline: {str(path)!r} is no JSON: {error}", code=2) from None
    try:
        if found["format"] != 1:
            raise Failed(f"--baseline: {str(path)!r}: expected format 1, got {found['format']!r}", code=2)
        _by_key(found)
        _ = [found[key] for key in _WHERE], found["versions"].items()
    except (KeyError, TypeError, AttributeError):
        raise Failed(
            f"--baseline: {str(path)!r}: expected a results.json that gnnaccel compare --suite has saved", code=2
        ) from None
    return {**found, "file": str(path)}


def _by_key(suite: dict[str, Any]) -> dict[tuple, dict]:
    """The comparisons that did not fail, by what they compare; reads all that `compare` needs."""
    found = {}
    for case in suite["cases"]:
        if not case["error"]:
            found[case["framework"], case["model"], case["dataset"]["name"], case["device"]] = case
            _ = [case["options"][key] for key in OPTIONS]
            _ = [side["epoch_time_median"] for side in case["sides"].values()], case["dataset"]["num_edges"]
    return found


def _name(key: tuple) -> str:
    framework, model, dataset, device = key
    return f"{framework} {model} on {dataset}, {device}"


def compare(old: dict[str, Any], new: dict[str, Any]) -> Changes:
    """What is another in `new`, a suite as results.json has it, than in `old`.

    A time counts as changed if its median is a tenth more or less, and the quartiles then and now do not overlap;
    memory if it is a tenth more or less.
    """
    before, after = _by_key(old), _by_key(new)
    worse, better, same, left = [], [], 0, []
    for key, case in after.items():
        if key not in before:
            left.append(f"{_name(key)}: not in the earlier report")
            continue
        why = _other_training(before[key], case)
        if why:
            left.append(f"{_name(key)}: {why}")
            continue
        for change, clear in _changes(_name(key), before[key], case):
            if clear and change.ratio > _MORE:
                worse.append(change)
            elif clear and change.ratio < 1 / _MORE:
                better.append(change)
            else:
                same += 1
    left += [f"{_name(key)}: only in the earlier report" for key in before if key not in after]
    differs = [f"{key}: {old[key]} then, {new[key]} now" for key in _WHERE if old[key] != new[key]]
    versions = [(name, old["versions"].get(name), version) for name, version in new["versions"].items()]
    differs += [f"{name}: {then} then, {now} now" for name, then, now in versions if then not in (None, now)]
    worse.sort(key=lambda change: -change.ratio)
    better.sort(key=lambda change: change.ratio)
    return Changes(old.get("file", ""), tuple(worse), tuple(better), same, tuple(left), tuple(differs))


def _batches(options: dict) -> str:
    fanouts = options.get("sample")
    return f"{','.join(map(str, fanouts))} in batches of {options['batch_size']}" if fanouts else "none"


def _other_training(old: dict, new: dict) -> str:
    pairs = [(key, old["options"][key], new["options"][key]) for key in OPTIONS]
    pairs.append(("sampled neighbours", _batches(old["options"]), _batches(new["options"])))
    pairs += [(key, old["dataset"].get(key), new["dataset"].get(key)) for key in ("num_nodes", "num_edges")]
    return "; ".join(f"{key} {then} then, {now} now" for key, then, now in pairs if then != now)


def _changes(name: str, old: dict, new: dict) -> Iterator[tuple[Change, bool]]:
    """Each figure of each side that both have, and whether the change is clear of the scatter."""
    for side, now in new["sides"].items():
        then = old["sides"].get(side)
        if then is None:
            continue
        times = Change(name, side, "epoch time", "ms", then["epoch_time_median"], now["epoch_time_median"])
        apart = now["epoch_time_q1"] > then["epoch_time_q3"] or now["epoch_time_q3"] < then["epoch_time_q1"]
        yield times, apart
        memory = [figures.get("peak_memory") for figures in (then, now)]
        if all(memory) and all(map(math.isfinite, memory)):
            yield Change(name, side, "peak memory", "MiB", memory[0], memory[1]), True
