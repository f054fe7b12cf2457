"""The binary's comparison of what containers hold: by identity, in order, without calling anything of Python's."""

from collections import OrderedDict

import pytest

from gnnaccel._library import same_objects
from gnnaccel.capture.reach import Reach


class Loud:
    """Whose comparison is an error."""

    def __eq__(self, other):
        raise AssertionError

    __hash__ = object.__hash__


ONE, OTHER, KEY = Loud(), Loud(), Loud()


def held(container):
    if isinstance(container, dict):
        return container, tuple(dict.values(container)), tuple(container)
    return container, tuple(container), None


def added(container):
    container["new"] = ONE


# container, what is done to it, whether it holds the same afterwards
CASES = {
    "nothing is done": ({"a": ONE, KEY: OTHER}, lambda c: None, True),
    "the same again": ({"a": ONE}, lambda c: c.update(a=ONE), True),
    "another value": ({"a": ONE, "b": ONE}, lambda c: c.update(b=OTHER), False),
    "an equal value": ({"a": 1}, lambda c: c.update(a=1.0), False),
    "a new key": ({"a": ONE}, added, False),
    "a key less": ({"a": ONE, "b": OTHER}, lambda c: c.pop("b"), False),
    "another key": ({"a": ONE, "b": OTHER}, lambda c: c.update(c=c.pop("b")), False),
    "another order": ({"a": ONE, "b": ONE}, lambda c: c.update(a=c.pop("a")), False),
    "empty": ({}, lambda c: None, True),
    "no longer empty": ({}, added, False),
    "ordered": (OrderedDict(a=ONE, b=OTHER), lambda c: None, True),
    "ordered, written": (OrderedDict(a=ONE, b=OTHER), lambda c: c.update(a=OTHER), False),
    "a list": ([ONE, OTHER], lambda c: None, True),
    "a longer list": ([ONE], lambda c: c.append(ONE), False),
    "a shorter list": ([ONE, OTHER], lambda c: c.pop(), False),
    "a list in another order": ([ONE, OTHER], lambda c: c.reverse(), False),
}


@pytest.mark.parametrize("name", CASES)
def test_what_containers_hold(name):
    container, change, same = CASES[name]
    kept = [held({"before": ONE}), held(container), held([OTHER])]
    assert same_objects(kept)
    change(container)
    assert same_objects(kept) is same


def test_an_order_that_only_python_knows():
    """That of an OrderedDict is not that of the dict it is: `Reach` looks at it too."""
    order = OrderedDict(a=ONE, b=ONE)
    kept, reach = held(order), Reach({"order": order})
    assert reach.difference() is None
    order.move_to_end("a")
    assert same_objects([kept]) and reach.difference() == "the order of order"


def test_what_is_no_container():
    for wrong in (1, (), ({}, ()), ({}, [], None), ({}, (), (1,)), ((1,), (1,), None), ({}, (), 1)):
        assert not same_objects([wrong])
    assert same_objects([])
    with pytest.raises(TypeError):
        same_objects(None)
