"""Settings of the kernel of neighbour groups: the rule, GNNAdvisor's equations, its search."""

from __future__ import annotations

import math

import pytest
import torch

from gnnaccel.graph.csr import Graph
from gnnaccel.schedule import groups, rules, worklist
from gnnaccel.schedule.groups import Setting, Size
from gnnaccel.schedule.worklist import Arrangement, Kernel


def graph_of(degrees) -> Graph:
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.tensor(degrees).cumsum(0)])
    return Graph(indptr, torch.zeros(int(indptr[-1]), dtype=torch.long), None, 1)


def test_settings_go_no_wider_than_the_features():
    assert {s.lanes for s in groups.settings(16)} == {4}
    assert {s.lanes for s in groups.settings(20)} == {4, 8}
    assert {s.lanes for s in groups.settings(512)} == {4, 8, 16, 32}
    for setting in groups.settings(512):
        assert Setting.of(setting.plan(Arrangement.HUBS)) == setting
        assert setting.plan(Arrangement.HUBS).workers * setting.lanes == setting.threads


@pytest.mark.parametrize(
    ("setting", "size", "want"),
    [  # equation 2 by hand, with alpha = 0.15 for equal degrees and 0.3 for uneven ones
        ((16, 128, 16), (1000, 4000, 0.0, 64), 4000 * 64 / (16 * (64 / 3 - 16) * 96) * (1 + 16 - 0.15 / 4)),
        ((4, 64, 32), (100, 1000, 20.0, 96), math.inf),
        ((4, 64, 32), (100, 1000, 20.0, 16), 1000 * 16 / (4 * (32 - 16 / 3) * 32) * (1 + 4 - 0.3 / 10)),
    ],
)
def test_latency(setting, size, want):
    assert math.isclose(groups.latency(Setting(*setting), Size(*size)), want)


def test_every_number_of_features_has_a_formula():
    for num_feats in range(1, 300):
        size = Size(1000, 20_000, 3.0, num_feats)
        best = groups.latency(groups.by_formula(size)[0], size)
        assert math.isfinite(best) is (num_feats != 12)  # where four lanes are all there are, and a third of 12


@pytest.mark.parametrize(
    ("setting", "degree", "num_feats", "want"),
    [
        ((64, 64, 4), 100, 64, True),  # 1024 products a thread, 10 KiB a block
        ((64, 64, 4), 100, 68, False),  # more products
        ((64, 512, 4), 64, 64, True),  # 32 KiB
        ((64, 512, 4), 32, 64, False),  # 64 KiB
    ],
)
def test_limits(setting, degree, num_feats, want):
    size = Size(1000, 1000 * degree, 0.0, num_feats)
    assert groups.fits(Setting(*setting), size) is want
    assert (Setting(*setting) in groups.by_formula(size)) is want


def test_nothing_fits_and_all_are_ranked():
    size = Size(10, 10, 0.0, 1 << 20)
    ranked = groups.by_formula(size)
    assert len(ranked) == len(groups.settings(1 << 20))
    assert [groups.latency(s, size) for s in ranked] == sorted(groups.latency(s, size) for s in ranked)


def test_search_finds_the_best_and_asks_once():
    space, asked = groups.settings(256), []
    best = Setting(64, 128, 8)

    def cost(setting):
        asked.append(setting)
        return sum(abs(math.log2(a / b)) for a, b in zip(setting, best, strict=True))

    found = groups.search(space, [space[0], space[-1]], cost)
    assert found[0] == best and len(asked) == len(set(asked)) == len(found) < len(space)
    assert groups.search(space, [space[0], space[-1]], cost) == found
    assert groups.search(space, [space[5]], cost, rounds=0) == [space[5]]


@pytest.mark.parametrize(
    ("degrees", "lanes", "want", "pays"),
    [  # group, workers of a block, their lanes; whether they serve, on the GPU that a graph on the CPU is taken for
        ([5] * 2000 + [100], 4, (16, 16, 4), True),  # a block holds the longest row
        ([5] * 20_000 + [500], 16, (32, 16, 16), True),  # one of larger groups does
        ([5] * 20_000 + [500], 64, (64, 8, 32), True),  # by warps that take half a row
        ([5] * 2000 + [100], 64, (16, 16, 16), True),  # too little work for those
        ([5] * 50_000 + [900], 8, (32, 32, 8), True),  # of more workers too
        ([5] * 2000 + [900], 8, (16, 16, 8), True),  # there would be few blocks
        ([5] * 2000 + [50_000], 16, (32, 16, 16), True),  # none does
        ([5] * 2000 + [20], 16, (16, 16, 16), False),  # no row is cut
        ([100] * 8000 + [3000], 4, (128, 32, 4), True),  # rows are long themselves
        ([500] * 20_000 + [3000], 64, (512, 8, 32), False),  # what a launch takes is little beside it
    ],
)
def test_rule(degrees, lanes, want, pays):
    graph = graph_of(degrees)
    plan = rules.groups_of(graph, lanes, Arrangement.LENGTH)
    assert (plan.cap, plan.workers, plan.slice_lanes) == want and plan.kernel is Kernel.GROUPS
    assert plan.threads in worklist.THREADS
    assert rules.groups_pay(graph, lanes, rules.plan_of(graph, lanes, False)) is pays
