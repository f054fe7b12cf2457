"""In what order, in which pieces and by which kernels the rows of a graph are worked on: docs/advisor.md."""

from gnnaccel.schedule.work import (
    Work,
    decide_tiles,
    epoch,
    epochs,
    inherit,
    is_new,
    note_use,
    of,
    ordered,
    prepare,
    unordered_epochs,
    work_list,
)

__all__ = [
    "Work",
    "decide_tiles",
    "epoch",
    "epochs",
    "inherit",
    "is_new",
    "note_use",
    "of",
    "ordered",
    "prepare",
    "unordered_epochs",
    "work_list",
]
