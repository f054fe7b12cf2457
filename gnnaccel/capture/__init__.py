"""Whole training steps captured in CUDA graphs: what a step reaches, when it may be captured, its replay."""

from gnnaccel.capture.steps import captured

__all__ = ["captured"]
