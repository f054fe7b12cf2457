"""On which thread backward passes run under the flag."""

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
