"""Whose samplers the plug-ins use, and where these run: ``GNNACCEL_SAMPLER`` in the environment.

``framework`` leaves sampling to the frameworks. ``cuda`` has the GPU sample for graphs on the CPU too. Without it, the
GPU samples from graphs that are there.
"""

from __future__ import annotations

import os

CHOICE = "GNNACCEL_SAMPLER"
_CHOICES = ("", "framework", "cuda")


def _chosen() -> str:
    choice = os.environ.get(CHOICE, "").strip().lower()
    if choice not in _CHOICES:
        raise ValueError(
            f"{CHOICE}={choice} is not understood: expected framework, cuda, or nothing for gnnaccel's samplers"
        )
    return choice


def is_frameworks() -> bool:
    """True if the user chose the frameworks' own samplers. ValueError for a choice that there is not."""
    return _chosen() == "framework"


def is_cuda() -> bool:
    """True if the user chose the GPU. ValueError for a choice that there is not."""
    return _chosen() == "cuda"
