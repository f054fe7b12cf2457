"""On which thread backward passes run under the flag, and what becomes of freed memory."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from gnnaccel import engine


@pytest.mark.parametrize(
    ("gpus", "choice", "ours"), [(1, "", True), (1, "threads", False), (2, "", False), (0, "", False)]
)
def test_backward_passes_run_on_the_calling_thread(gpus, choice, ours, monkeypatch):
    """Where there is one GPU, and nobody asked for torch's threads; until it is undone."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv(engine.CHOICE, choice)
    monkeypatch.setattr(engine, "_settled", False)
    with torch.autograd.set_multithreading_enabled(True):
        assert (engine.settle() is not None) == ours
        assert torch.autograd.is_multithreading_enabled() != ours
        engine.restore()
        assert torch.autograd.is_multithreading_enabled()


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with torch.autograd.set_multithreading_enabled(False):
        assert engine.settle() is None
        engine.restore()
        assert not torch.autograd.is_multithreading_enabled()


STEP = """
import ctypes
from gnnaccel import engine

libc = ctypes.CDLL(None)
libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
engine.keep_memory()
for _ in range(2):
    blocks = [libc.malloc(1 << 20) for _ in range(48)]
    before = libc.sbrk(0)
    for block in blocks:
        libc.free(ctypes.c_void_p(block))
print((before - libc.sbrk(0)) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ, reason="not glibc's malloc")
def test_freed_memory_is_there_in_the_next_step():
    """Of 48 MB nothing goes back to the system: else all of it."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    ran = subprocess.run([sys.executable, "-c", STEP], env=bare, capture_output=True, text=True, check=True)
    assert ran.stdout == "0\n"
