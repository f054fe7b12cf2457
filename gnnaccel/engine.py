"""What the process is told once, when acceleration is switched on.

Backward passes on the thread that asks for them, where there is one GPU: torch runs the backward of CUDA tensors on a
thread of its own for each GPU. With one GPU nothing runs beside it: the calling thread waits, and both change places
twice in each step, with cold caches on another core.

Memory of host tensors that is kept from step to step: glibc gives freed memory back to the system when there are twice
as many bytes at the end of the heap as the greatest block had that was ever freed, up to one of 32 MB. Tensors of small
graphs are blocks of less than 1 MB, so a step's activations go back and come again, page by page: of four GINConv of
64 on 128 molecules up to 1,100 pages a step, 2 of 12 ms (an EPYC).

Huge pages for large host tensors: torch maps each one anew, in steps of 4 KiB where nobody asks for steps of 2 MiB.
Beside user_layers_cpu.csv in benchmarks/results, user_layers_huge_pages.csv shows what that takes.
"""

from __future__ import annotations

import os

from gnnaccel import settings
from gnnaccel.lower import bounds

CHOICE = "GNNACCEL_BACKWARD"
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch's own, of 2.2 and later, read at its first tensor
SYSTEM = "/sys/kernel/mm/transparent_hugepage/enabled"

_settled = False


def ask_for_huge_pages() -> bool:
    """Have torch ask for huge pages for tensors of 2 MB and more, where the system gives them to who asks; before its
    first tensor. Where the user has set torch's variable it stays. True if it is set now."""
    try:
        with open(SYSTEM) as file:
            are_for_who_asks = "[madvise]" in file.read()
    except OSError:
        return False
    if not are_for_who_asks or HUGE_PAGES in os.environ:
        return False
    os.environ[HUGE_PAGES] = "1"
    return True


def keep_memory() -> None:
    """Have glibc keep up to 64 MB of freed memory, as it does in any program that has freed a tensor of 32 MB: by
    freeing one, which nobody has written to. Where MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_ is set it stays as
    that says, and so does another malloc."""
    import torch  # not at the top: a Python start that only carries the flag does without

    torch.empty(bounds.HEAP_BYTES, dtype=torch.uint8, device="cpu")


def settle() -> str | None:
    """Have backward passes of this thread run on it, if one GPU is there; what is said of it in the log, or None.

    GNNACCEL_BACKWARD=threads leaves them as torch has them. Threads that the program starts keep torch's way.
    """
    import torch

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
