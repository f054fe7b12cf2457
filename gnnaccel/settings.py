"""The environment variables of gnnaccel and their values; docs/environment.md says what each does.

A value that is not understood, and a variable that there is not, are said once, by `complaints`, when acceleration is
switched on. Imported by a Python start that only carries the flag: neither torch nor anything slow.
"""

from __future__ import annotations

import functools
import os

ON, OFF = ("1", "on", "true", "yes"), ("", "0", "off", "false", "no")
ANY = None  # a path, or what is checked elsewhere
CHECKED = "_GNNACCEL_CHECKED"  # set once complaints were made: worker processes do not repeat them
VALUES: dict[str, tuple[str, ...] | None] = {
    "GNNACCEL": ANY,  # switch.parse_flag
    "GNNACCEL_AGE": ("new", "lasting"),
    "GNNACCEL_BACKWARD": ("threads",),
    "GNNACCEL_CUDA": ("auto", "on", "off"),  # of the build
    "GNNACCEL_CUDA_GRAPHS": ("1", "0"),
    "GNNACCEL_DATA": ANY,
    "GNNACCEL_DGL_KERNELS": ("torch",),
    "GNNACCEL_DUMP_MESSAGES": ANY,
    "GNNACCEL_EMULATE": ANY,  # of the tests
    "GNNACCEL_FIRST_ROWS": ("1", "0"),
    "GNNACCEL_ISA": ("baseline", "avx2", "avx512"),
    "GNNACCEL_LABEL": ANY,  # of the build
    "GNNACCEL_PROFILE": ANY,
    "GNNACCEL_SAMPLER": ("framework", "cuda"),
    "GNNACCEL_SAMPLER_AHEAD": ("0", "1", "2", "4"),
    "GNNACCEL_VERBOSE": ("1", "0"),
}


def value(name: str) -> str:
    """The variable in lower case; "" where it is not set, or not understood."""
    raw = os.environ.get(name)  # once: samplers ask for each batch
    return "" if raw is None else _understood(name, raw)


def is_on(name: str) -> bool:
    """True if the variable is set, understood, and no word for off."""
    return value(name) not in OFF


@functools.lru_cache(maxsize=256)
def _understood(name: str, raw: str) -> str:
    return "" if _complaint(name, raw) else raw.strip().lower()


def complaint(name: str) -> str | None:
    """What is wrong with the variable's value, with those that there are; None if nothing is."""
    raw = os.environ.get(name)
    return None if raw is None else _complaint(name, raw)


def _complaint(name: str, raw: str) -> str | None:
    allowed, said = VALUES[name], raw.strip().lower()
    if allowed is ANY or said in allowed or not said or ("1" in allowed and said in (*ON, *OFF)):
        return None
    expected = " or ".join(filter(None, (", ".join(allowed[:-1]), allowed[-1])))
    return f"{name}={raw} is not understood: expected {expected}"


def complaints() -> list[str]:
    """What is wrong with the environment's variables whose names begin with GNNACCEL."""
    found = []
    for name in sorted(os.environ):
        if name in VALUES:
            found.append(complaint(name))
        elif name.startswith("GNNACCEL_"):
            import difflib  # here alone: hardly ever wanted

            ends = {known.removeprefix("GNNACCEL_"): known for known in VALUES}
            close = difflib.get_close_matches(name.removeprefix("GNNACCEL_"), ends, n=1, cutoff=0.7)
            meant = f"did you mean {ends[close[0]]}?" if close else f"there are {', '.join(VALUES)}"
            found.append(f"{name} is no variable of gnnaccel: {meant}")
    return [one for one in found if one]
