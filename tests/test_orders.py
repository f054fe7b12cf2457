"""Orders on disk: found again by the same graph alone, and never trusted."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from gnnaccel import schedule
from gnnaccel.graph import reorder, store
from gnnaccel.graph.csr import Graph


def graph(seed=0) -> Graph:
    """A band of 3000 nodes under mixed numbers."""
    torch.manual_seed(seed)
    rows = torch.arange(3000).repeat_interleave(12)
    cols = (rows + torch.randint(1, 9, rows.shape)) % 3000
    name = torch.randperm(3000)
    return Graph.from_coo(name[rows], name[cols], num_rows=3000, num_cols=3000)


ORDER = torch.randperm(3000)


@pytest.mark.parametrize("order", [ORDER, None])
def test_what_is_saved_is_found(tmp_path, order):
    folder = tmp_path / "deep" / "er"
    path = store.save_order(graph(), "communities", order, folder)
    assert list(folder.iterdir()) == [path]
    found = store.load_order(graph(), "communities", folder)
    assert found is None if order is None else torch.equal(found, order)
    for other, method in ((graph(1), "communities"), (graph(), "rcm")):
        with pytest.raises(FileNotFoundError):
            store.load_order(other, method, folder)


def resaved(path, **changes):
    """Writes the file again with other arrays."""
    with np.load(path) as found:
        arrays = dict(found)
    np.savez(path, **{**arrays, **{k: f(arrays[k]) for k, f in changes.items()}})


def signed(order):
    """About an order of `graph()` that is no order."""
    return lambda old: np.array(store._about(graph(), "communities", order))


ONES = np.ones(3000, np.int32)
DAMAGES = {
    "cut short": (lambda p: p.write_bytes(p.read_bytes()[:500]), "not a file of an order"),
    "one byte": (lambda p: p.write_bytes(p.read_bytes().replace(b"order", b"ordes")), "not a file of an order"),
    "no zip": (lambda p: p.write_text("{}"), "not a file of an order"),
    "folder": (lambda p: (p.unlink(), p.mkdir()), "not a file of an order"),
    "other numbers": (lambda p: resaved(p, order=lambda o: o[::-1].copy()), "checksum"),
    "version": (lambda p: resaved(p, about=lambda a: np.array(str(a).replace('"0.', '"9.'))), "version"),
    "objects": (lambda p: resaved(p, order=lambda o: np.array([{}], dtype=object)), "not a file of an order"),
    "floats": (lambda p: resaved(p, order=lambda o: o.astype(float)), "checksum"),
    "no order": (lambda p: resaved(p, order=lambda o: ONES, about=signed(ONES)), "no order of the rows"),
    "few rows": (lambda p: resaved(p, order=lambda o: ONES[:9], about=signed(ONES[:9])), "no order of the rows"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_does_not_fit_is_told_apart(tmp_path, name):
    damage, reason = DAMAGES[name]
    damage(store.save_order(graph(), "communities", ORDER, tmp_path))
    with pytest.raises(store.Stale, match=reason):
        store.load_order(graph(), "communities", tmp_path)


def test_no_damage_is_fatal(tmp_path):
    """Whatever bit of a file is another one, it is of no use, or it is what it was."""
    few = Graph.from_coo(torch.arange(40), torch.arange(40).flip(0), num_rows=40, num_cols=40)
    order = torch.randperm(40)
    path = store.save_order(few, "degree", order, tmp_path)
    good = path.read_bytes()
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ (1 << i % 8)]) + good[i + 1 :])
        with contextlib.suppress(store.Stale):
            assert torch.equal(store.load_order(few, "degree", tmp_path), order)


def test_prepare_looks_once(tmp_path, monkeypatch):
    first = graph()
    schedule.prepare(first, "communities", folder=tmp_path)
    assert schedule.of(first).reordered and schedule.of(first).order_note == ""
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"")
    stale = graph()
    schedule.prepare(stale, "communities", folder=tmp_path)
    assert "of no use" in schedule.of(stale).order_note
    assert torch.equal(schedule.of(stale).order, schedule.of(first).order)
    monkeypatch.setattr(reorder, "order_by", lambda *_: pytest.fail("looked for an order that is on disk"))
    again = graph()
    schedule.prepare(again, "communities", folder=tmp_path)
    assert schedule.of(again).reordered and schedule.of(again).order_note == "from disk"
    assert torch.equal(schedule.of(again).order, schedule.of(first).order)
    schedule.prepare(again, "communities")
    assert schedule.of(again).order_note == ""


def test_an_order_that_is_there_is_kept_too(tmp_path):
    one = graph()
    schedule.prepare(one, "degree")
    schedule.prepare(one, "degree", folder=tmp_path)
    assert torch.equal(store.load_order(graph(), "degree", tmp_path), schedule.of(one).order)
