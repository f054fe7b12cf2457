"""The cases that are left of a test over many lists of parameters."""

from itertools import combinations, product

import pytest
from pairwise import covering


def pairs(cases):
    return set().union(*(combinations(enumerate(case), 2) for case in cases))


@pytest.mark.parametrize("sizes", [(3, 4, 5), (2, 2, 2, 2), (2, 6, 3, 7)], ids=str)
def test_every_pair_of_values_is_in_one_of_the_few_cases(sizes):
    cases = list(product(*map(range, sizes)))
    few = [cases[k] for k in covering(cases)]
    assert pairs(few) == pairs(cases) and len(few) < len(cases) / 2
    assert covering(cases) == covering(cases)


def test_all_cases_over_two_lists_are_kept():
    assert covering(list(product(range(3), range(4)))) == list(range(12))


def test_cases_that_are_no_full_product():
    assert covering([(0, 0, 0), (0, 1, 1), (1, 1, 1)]) == [0, 1, 2]
    assert covering([(0, 0, 0), (0, 0, 0)]) == [0]
