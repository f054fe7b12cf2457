"""Training steps and modules captured in CUDA graphs: what they reach, when they may be captured, their replay."""

from gnnaccel.capture.attaching import attach, captures_of, detach
from gnnaccel.capture.steps import captured

__all__ = ["attach", "captured", "captures_of", "detach"]
