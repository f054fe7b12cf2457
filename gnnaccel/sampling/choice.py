"""Whose samplers the plug-ins use, and where these run: ``GNNACCEL_SAMPLER`` in the environment.

``framework`` leaves sampling to the frameworks. ``cuda`` has the GPU sample for graphs on the CPU too. Without it, the
GPU samples from graphs that are there.
"""

from __future__ import annotations

from gnnaccel import settings

CHOICE = "GNNACCEL_SAMPLER"


def _chosen() -> str:
    chosen = settings.value(CHOICE)
    if not chosen and (complaint := settings.complaint(CHOICE)):
        raise ValueError(f"{complaint}, or nothing for gnnaccel's samplers")
    return chosen


def is_frameworks() -> bool:
    """True if the user chose the frameworks' own samplers. ValueError for a choice that there is not."""
    return _chosen() == "framework"


def is_cuda() -> bool:
    """True if the user chose the GPU. ValueError for a choice that there is not."""
    return _chosen() == "cuda"
