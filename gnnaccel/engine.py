"""Backward passes on the thread that asks for them, where there is one GPU.

torch runs the backward of CUDA tensors on a thread of its own for each GPU. With one GPU nothing runs beside it: the
calling thread waits, and both change places twice in each step, with cold caches on another core.
"""

from __future__ import annotations

from gnnaccel import settings

CHOICE = "GNNACCEL_BACKWARD"

_settled = False


def settle() -> str | None:
    """Have backward passes of this thread run on it, if one GPU is there; what is said of it in the log, or None.

    GNNACCEL_BACKWARD=threads leaves them as torch has them. Threads that the program starts keep torch's way.
    """
    import torch  # not at the top: a Python start that only carries the flag does without

    global _settled
    if _settled or settings.value(CHOICE) == "threads" or not torch.version.cuda:
        return None
    # device_count() asks the driver's library: is_available() could start CUDA, which forked workers cannot take over.
    if torch.cuda.device_count() != 1 or not torch.autograd.is_multithreading_enabled():
        return None
    _settled = True
    torch.autograd.set_multithreading_enabled(False)
    return "one GPU: backward passes run on the thread that calls them"


def restore() -> None:
    """Undo `settle`, on the thread that called it."""
    global _settled
    if _settled:
        import torch

        torch.autograd.set_multithreading_enabled(True)
        _settled = False
