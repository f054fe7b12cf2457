"""Whose samplers the plug-ins use: ``GNNACCEL_SAMPLER=framework`` in the environment leaves them to the frameworks."""

from __future__ import annotations

import os

CHOICE = "GNNACCEL_SAMPLER"


def is_frameworks() -> bool:
    """True if the user chose the frameworks' own samplers. ValueError for a choice that there is not."""
    choice = os.environ.get(CHOICE, "").strip().lower()
    if choice not in ("", "framework"):
        raise ValueError(f"{CHOICE}={choice} is not understood: expected framework, or nothing for gnnaccel's samplers")
    return bool(choice)
