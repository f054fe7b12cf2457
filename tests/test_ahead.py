"""The order in which the sampler's stream and the training one are told to wait, on streams that only take notes."""

import contextlib

import pytest
import torch

from gnnaccel.sampling import ahead

CPU = torch.device("cpu")


class Stream:
    def __init__(self, name, notes):
        self.name, self.notes, self.count = name, notes, 0

    def record_event(self):
        self.count += 1
        return Event(self.count, self.notes)

    def wait_stream(self, other):
        self.notes.append(f"{self.name} waits for {other.name}")


class Event:
    def __init__(self, number, notes):
        self.number, self.notes = number, notes

    def synchronize(self):
        self.notes.append(f"the host waits for {self.number}")


class Noted(torch.Tensor):
    def record_stream(self, stream):
        stream.notes.append(f"kept for {stream.name}")


@pytest.fixture
def notes(monkeypatch):
    found = []
    training, sampling = Stream("training", found), Stream("sampling", found)

    @contextlib.contextmanager
    def on(stream):
        found.append(f"on {stream.name}")
        yield
        found.append("back")

    monkeypatch.setattr(ahead, "_lanes", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: sampling)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return found


def batch(is_step=True):
    with ahead.beside(CPU, is_step) as made:
        made.append(torch.zeros(3).as_subclass(Noted))
    return made[0]


AROUND = ["on sampling", "back", "training waits for sampling", "kept for training"]


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_how_far_ahead_the_host_is(steps, notes, monkeypatch):
    monkeypatch.setenv(ahead.VARIABLE, str(steps))
    for _ in range(6):
        notes.append("next")
        batch()
    waits = [note for note in notes if note.startswith("the host")]
    assert waits == [f"the host waits for {number}" for number in range(1, 7 - steps)]
    start = notes.index("next")
    assert notes[start + 1 : start + 5] == AROUND


def test_what_is_made_for_the_same_batch(notes, monkeypatch):
    monkeypatch.setenv(ahead.VARIABLE, "1")
    for _ in range(3):
        batch()
        batch(is_step=False)
    assert [note for note in notes if note.startswith("the host")] == [f"the host waits for {n}" for n in (1, 2)]


def test_what_was_made_there(notes):
    first = batch()
    assert ahead.is_beside(first) and not ahead.is_beside(first, torch.zeros(3))
    second = batch()
    assert ahead.is_beside(second) and not ahead.is_beside(first, second)


@pytest.mark.parametrize("said", ["0", "off"])
def test_on_the_training_stream(said, notes, monkeypatch):
    monkeypatch.setenv(ahead.VARIABLE, said)
    assert not ahead.is_beside(batch()) and not notes


@pytest.mark.parametrize(("said", "depth"), [("", 2), ("on", 2), ("4", 4), ("many", 2), ("off", 0)])
def test_depth(said, depth, monkeypatch):
    monkeypatch.setenv(ahead.VARIABLE, said)
    assert ahead.depth() == depth


def test_nothing_beside_a_capture(notes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    batch()
    assert not notes
