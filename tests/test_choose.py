"""The answers that decide which way a call goes: by size, age and capture."""

import itertools

import pytest
import torch

from gnnaccel import report
from gnnaccel.lower import bounds, choose


def aged(uses):
    age = choose.Age()
    for _ in range(uses):
        age.use()
    return age


@pytest.mark.parametrize("fixed", ["", "new", "lasting"])
@pytest.mark.parametrize("captured", [False, True])
def test_age(monkeypatch, captured, fixed):
    monkeypatch.setattr(choose, "fixed", fixed)
    monkeypatch.setattr(bounds, "NEW_GRAPH_USES", 12)
    monkeypatch.setattr(bounds, "LASTING_USES", 50)
    monkeypatch.setattr(choose, "_captured", captured)
    for uses in (0, 1, 11, 12, 13, 49, 50, 51, 99, 100, 101):
        age = aged(uses)
        if captured:
            expected = False, True
        else:
            expected = {"new": (True, False), "lasting": (False, True), "": (uses < 12, uses >= 50)}[fixed]
        assert (choose.is_new(age), choose.lasts(age)) == expected, uses


@pytest.mark.parametrize("step", [1, 2, 3, 50])
@pytest.mark.parametrize("start", [1, 20, 49])
def test_what_is_earned_is_asked_for_in_the_end(start, step):
    """Whoever else uses the graph meanwhile; and after it was refused now and then, not at each call."""
    age, since, asked = aged(start), start, []
    for call in range(400):
        for _ in range(step - 1):
            age.use()
        age.use()
        if choose.earns(age, since):
            asked.append(call)
            since = age.uses
    first = -(-(bounds.LASTING_USES - start) // step) - 1
    assert asked[0] == first and asked[1] - first == -(-bounds.LASTING_USES // step)


def test_what_is_earned_where_ages_are_fixed(monkeypatch):
    monkeypatch.setattr(choose, "fixed", "new")
    assert not choose.earns(aged(200), 3)
    monkeypatch.setattr(choose, "fixed", "lasting")
    assert choose.earns(aged(60), 3) and not choose.earns(aged(40), 3)
    monkeypatch.setattr(choose, "_captured", True)
    assert choose.earns(aged(1), 1)


def before(kind, edges, width, nodes, first, compiled, side):
    """What five places answered before there was one."""
    if first:
        most = bounds.FEW_AT_FIRST.get(kind, 0)
        return edges * width <= most and edges * side <= 8 * most
    if compiled:
        return edges * width <= 1 << 22
    most = {"cpu": 1 << 18, "cuda": 8 << 20}.get(kind, 0)
    return edges * width <= (2 * most if kind == "cpu" and edges <= 4 * nodes else most)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "meta"])
def test_few_messages(monkeypatch, kind):
    monkeypatch.setattr(bounds, "FEW_MESSAGES", {"cpu": 1 << 18, "cuda": 8 << 20})
    monkeypatch.setattr(bounds, "FEW_AT_FIRST", {"cuda": 8 << 20})
    sizes = [0, 1, 1 << 10, (1 << 13) + 1, 1 << 16, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 1 << 22, 1 << 24]
    answers = set()
    for edges, width, nodes, side in itertools.product(sizes, [0.5, 1, 7, 64, 300], [0, 1, 1 << 12, 1 << 20], [1, 600]):
        for first, compiled in [(False, False), (True, False), (False, True)]:
            found = choose.are_few(
                device=kind, edges=edges, width=width, nodes=nodes, first=first, compiled=compiled, side=side
            )
            assert found == before(kind, edges, width, nodes, first, compiled, side)
            answers.add(found)
    assert answers == {True, False}


def test_none_are_few_where_order_or_capture_counts():
    few = dict(edges=1, width=1, nodes=1)
    with choose.lasting():
        assert not choose.are_few(device="cpu", **few) and not choose.are_few(device="cuda", **few)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert not choose.are_few(device="cuda", first=True, **few)
    finally:
        torch.use_deterministic_algorithms(was)


def test_a_profile_counts_ages(monkeypatch):
    monkeypatch.setattr(report, "timing", True)
    report.reset()
    aged(bounds.LASTING_USES + 5)
    assert report.to_dict()["graphs"] == {"new": 8, "used": 42, "lasting": 5}
    report.count("pyg.GCNConv")
    assert "5 on lasting ones, 8 on new ones, 42 on used ones" in report.table()
    report.reset()
    assert not report.to_dict()["graphs"]
