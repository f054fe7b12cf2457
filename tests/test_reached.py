"""What counts the calls of tests fails where it is to: on reports as the plug-ins make them."""

import pytest
from reached import REFUSED, Counted, Left, bounded, by_design, calls_of

from gnnaccel import report
from gnnaccel.lower import bounds, choose


def calls(kind="pyg.Layer", accelerated=0, left=0, reason="it writes in place"):
    """Report so many."""
    for _ in range(accelerated):
        report.count(kind)
    for _ in range(left):
        report.fallback(kind, reason)


def counted(make, expected=None):
    """Count what `make` reports, as one case."""
    with Counted("a test") as found, found.case() as case:
        make()
        case.expected = expected
    return found


def test_bounds_are_0_inside():
    own = {"FEW_MESSAGES": {"cpu": 100}, "SAMPLED_PRODUCTS": 100}
    with bounded(own):
        assert choose.are_few(device="cpu", edges=10, nodes=9, width=10)
        with Counted("a test") as found, found.case():
            assert not choose.are_few(device="cpu", edges=10, nodes=9, width=10) and bounds.SAMPLED_PRODUCTS == 0
            calls(accelerated=1)
        assert choose.are_few(device="cpu", edges=10, nodes=9, width=10) and bounds.SAMPLED_PRODUCTS == 100


def test_nine_tenths():
    assert counted(lambda: calls(accelerated=9, left=1)).ours.total == 10
    with pytest.raises(AssertionError, match=r"(?s)8 of 10 calls accelerated.*\n  2x pyg.Layer: it writes in place"):
        counted(lambda: calls(accelerated=8, left=2))
    with pytest.raises(AssertionError, match="8 of 10 calls accelerated"):  # PyG makes the messages of two
        counted(lambda: (calls(accelerated=8), calls("pyg.Layer segment", accelerated=2)))
    with pytest.raises(AssertionError, match=r"(?s)small calls were left.*few messages"):
        counted(lambda: calls(accelerated=99, left=1, reason="few messages, which PyG reduces"))
    with pytest.raises(AssertionError, match="cases without a call"):
        counted(lambda: None)
    with pytest.raises(AssertionError, match="refuses too many"):
        counted(lambda: calls(accelerated=1), REFUSED)


def test_what_a_test_forgets_is_counted():
    with pytest.raises(AssertionError, match="0 of 3 calls accelerated"):
        counted(lambda: (calls(left=3), report.reset()))


def test_left_by_design():
    assert counted(lambda: calls(left=10), Left("in place")).as_designed == 10
    assert counted(lambda: calls(accelerated=5, left=5), Left("in place", some=True)).as_designed == 10
    for make, expected in (
        (lambda: calls(accelerated=2, left=8), Left("in place")),
        (lambda: calls(left=10), Left("a hook")),
        (lambda: calls(accelerated=10), Left("in place", some=True)),
    ):
        with pytest.raises(AssertionError, match="went otherwise"):
            counted(make, expected)


def test_parts_of_a_case():
    with Counted("a test") as found, found.case():
        calls(accelerated=1)
        with by_design("in place"):
            calls(left=1)
        calls(accelerated=1)
    assert (found.ours.accelerated, found.ours.total, found.as_designed, found.empty) == (2, 2, 1, 0)


@pytest.mark.parametrize(
    ("kind", "reason", "accelerated"),
    [
        ("pyg.first rows", "all rows of some layers of Net: mean()", 2),
        ("pyg.first rows", "all rows of Net: hooks", 3),  # which is not counted as a call
        ("dgl.message function", "cumsum() takes one row per edge", 2),
        ("pyg.Layer", "", 3),
    ],
)
def test_kinds(kind, reason, accelerated):
    site = report.Site(accelerated=3, reasons={reason: 1} if reason else {})
    found = calls_of({kind: site, "dgl.others": report.Site(left=1)}, kind)
    assert (found.accelerated, found.missed) == (accelerated, int(bool(reason)))
