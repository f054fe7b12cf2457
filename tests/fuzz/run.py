"""Run the fuzz targets for a while, or one case again.

    python tests/fuzz/run.py --minutes 10 [--seed S] [--only TARGET]
    python tests/fuzz/run.py --only TARGET --case SEED

The targets share the time. Each failure is printed with the command that repeats it; exit status 1 if there was any.
So is a target of which fewer than nine tenths of the calls were accelerated (reached.py).
Cases are numbered from 1,000,000 * S on. The number last printed says where to look after a crash of the process.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import sys
import time
import traceback
import warnings
from pathlib import Path

if __name__ == "__main__":
    _TESTS = Path(__file__).resolve().parent.parent
    sys.path[:1] = [str(_TESTS), str(_TESTS.parent)]  # and not this folder, whose modules have others' names

import torch
from reached import Counted

from fuzz import CALLS, TARGETS

CASES = 1_000_000  # of one seed
_HANGS_S = 300  # after which a case is taken to hang: every thread's stack is printed, and the process ends
_MOST_FAILURES = 20  # of one target: what is broken everywhere need not be printed a thousand times


class _Uncounted(Counted):
    """Of what calls ops itself, and is never left to a framework."""

    def check(self) -> None:
        """Nothing."""


def counted(target: str) -> Counted:
    """What counts the calls of a target, and checks how many were accelerated."""
    importlib.import_module(f"fuzz.{target}")  # with the bounds that are to be 0
    return (Counted if target in CALLS else _Uncounted)(target)


def run_case(target: str, seed: int):
    """One case, which returns what is expected of its calls; what it set globally does not reach the next one."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"fuzz.{target}").case(seed)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(False)


def run_target(target: str, seconds: float, seed: int) -> tuple[int, int]:
    """(cases, failures) of one target in this time."""
    reached = counted(target)
    try:
        with reached:
            cases, failures = _run(target, time.monotonic() + seconds, seed, reached)
    except AssertionError as error:
        print(f"FAILED: {error}", flush=True)
        failures += 1
    print(reached.shares(), flush=True)
    return cases, failures


def _run(target: str, end: float, seed: int, reached: Counted) -> tuple[int, int]:
    """(cases, failures) until then."""
    shown, cases, failures = 0.0, 0, 0
    while time.monotonic() < end and failures < _MOST_FAILURES:
        number = seed * CASES + cases
        if time.monotonic() > shown + 10:
            shown = time.monotonic()
            print(f"{target}: case {number}", flush=True)
        faulthandler.dump_traceback_later(_HANGS_S, exit=True)
        try:
            with reached.case() as case:
                case.expected = run_case(target, number)
        except Exception:
            failures += 1
            traceback.print_exc(file=sys.stdout)
            print(f"FAILED: python tests/fuzz/run.py --only {target} --case {number}", flush=True)
        faulthandler.cancel_dump_traceback_later()
        cases += 1
    return cases, failures


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=TARGETS, metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--case", type=int, metavar="SEED", help="run this case of --only alone")
    options = parser.parse_args()
    faulthandler.enable()
    if options.case is not None:
        if options.only is None:
            parser.error("--case needs --only TARGET")
        with _Uncounted(options.only):
            run_case(options.only, options.case)
        return 0
    chosen = [options.only] if options.only else list(TARGETS)
    results = {t: run_target(t, 60 * options.minutes / len(chosen), options.seed) for t in chosen}
    for target, (cases, failures) in results.items():
        print(f"{target}: {cases} cases, {failures} failed")
    return int(any(failures for _, failures in results.values()))


if __name__ == "__main__":
    sys.exit(main())
