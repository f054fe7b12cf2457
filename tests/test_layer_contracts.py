"""GAT, GATv2, HAN and sums with own features, of several edge types in one node of autograd: layer_contracts.py."""

import layer_contracts as contracts
import pytest
import test_gat_layers
import test_gatv2_layers
import test_han_layers
import test_own_sums
from test_relation_sums import keeper

from gnnaccel.ops.gat_layers import How
from gnnaccel.ops.own_sums import own_sums


def attention(module, call, name, heads=2, outputs=2, concat=True, biases=True):
    targets, leaves = module.case(name, heads, outputs, concat, biases)
    how, (kept, _) = How(0.2, concat), keeper()
    assert module.takes([layer for layers in targets for layer in layers])
    return contracts.Op(lambda: call(targets, how, kept), lambda: module.wanted(targets, how), leaves)


def gat(*given):
    return attention(test_gat_layers, test_gat_layers.gat_layers, *given)


def gatv2(*given):
    return attention(test_gatv2_layers, test_gatv2_layers.gatv2_layers, *given)


def han(name, heads=2, width=3, scaled=True):
    plan, maps, leaves, described = test_han_layers.case(name, heads, width)
    scale, slope = described[2][plan.order] if scaled else None, test_han_layers.SLOPE
    assert test_han_layers.takes(plan, maps, slope)
    return contracts.Op(
        lambda: test_han_layers.han_attention(plan, maps, scale, slope),
        lambda: test_han_layers.definition(maps, described, scaled),
        leaves,
        has_zeros=name != "into all",
    )


def sums(each):
    layers, xs = test_own_sums.case()
    kept, _ = keeper()
    return contracts.Op(lambda: own_sums(layers, kept, each), lambda: test_own_sums.wanted(layers), xs)


SHAPES = [(1, 4, True, True), (2, 3, True, False), (3, 4, False, True)]  # heads, outputs, concat, biases
OPS = {
    **{f"GAT, {name}, {shape}": (gat, name, *shape) for name in test_gat_layers.CASES for shape in SHAPES},
    **{f"GATv2, {name}, {shape}": (gatv2, name, *shape) for name in test_gatv2_layers.CASES for shape in SHAPES},
    **{
        f"HAN, {name}, {heads} heads{', scaled' * scaled}": (han, name, heads, width, scaled)
        for name in test_han_layers.CASES
        for heads, width in ((2, 3), (1, 4), (3, 4))
        for scaled in (True, False)
    },
    "sums": (sums, False),
    "sums, one by one": (sums, True),
}
# One each with results for all three types of nodes, and one into a single type.
INTO_ALL = {"GAT": (gat, "into all", 2, 4), "GATv2": (gatv2, "into all", 2, 4), "HAN": (han, "into all", 2, 3, False)}
OF_SECOND_ORDER = {"GAT": (gat, "into one"), "GATv2": (gatv2, "into one"), "HAN": (han, "into one")}
OF_SECOND_ORDER |= {name: OPS[name] for name in OPS if name.startswith("sums")}


@pytest.mark.parametrize("op", OPS)
def test_results_and_gradients(op):
    make, *given = OPS[op]
    contracts.results_and_gradients(make(*given))


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("used", [(0,), (1, 2), (2,)])
@pytest.mark.parametrize("op", INTO_ALL)
def test_gradients_where_some_results_are_used(op, used, second):
    make, *given = INTO_ALL[op]
    contracts.gradients_where_some_results_are_used(make(*given), used, second)


@pytest.mark.parametrize("op", OF_SECOND_ORDER)
def test_second_derivatives(op):
    make, *given = OF_SECOND_ORDER[op]
    contracts.second_derivatives(make(*given))


@pytest.mark.parametrize("op", OF_SECOND_ORDER)
def test_gradients_of_several_vectors_at_once(op):
    make, *given = OF_SECOND_ORDER[op]
    contracts.gradients_of_several_vectors_at_once(make(*given))
