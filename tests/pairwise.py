"""Of a test over three or more lists of parameters, few cases that hold every pair of values; `--all` runs all.

Most faults need one value or two that meet. A test over one list or two keeps all its cases. Pairs are counted for
each device apart, as CUDA is skipped where there is none, and of cases that the mark `only` lets through.
"""

from collections import Counter
from inspect import signature
from itertools import combinations

DEVICES = {"cpu", "cuda"}


def covering(cases):
    """Indices of cases, tuples of one length, with each pair of values that any case holds: the same on every call."""
    pairs = [set(combinations(enumerate(case), 2)) for case in cases]
    missing, used, kept = set().union(*pairs), Counter(), []

    def worth(k):  # what is new; else what has been taken least, so that a pair meets many values of other lists
        return len(pairs[k] & missing), -sum(used[pair] for pair in pairs[k])

    while missing:
        best = max(range(len(cases)), key=worth)
        kept.append(best)
        missing -= pairs[best]
        used.update(pairs[best])
    return sorted(kept)


def _is_case(item):
    """Whether the condition of its mark `only`, on parameters by name, holds."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    conditions = [mark.kwargs["where"] for mark in item.iter_markers("only")]
    return all(condition(*(given[name] for name in signature(condition).parameters)) for condition in conditions)


def thinned(items, whole=False):
    """Collected tests: those that run, and those that are left out."""
    groups, out = {}, {item for item in items if not _is_case(item)}
    for item in items:
        if not whole and item not in out and (spec := getattr(item, "callspec", None)):
            on = frozenset(DEVICES.intersection(spec._idlist))
            groups.setdefault((item.nodeid.partition("[")[0], on), []).append(item)
    for group in groups.values():
        cases = [tuple(item.callspec._idlist) for item in group]  # an id of each list of parameters
        if sum(len(set(ids)) > 1 for ids in zip(*cases, strict=True)) > 2:
            out |= set(group) - {group[k] for k in covering(cases)}
    return [item for item in items if item not in out], [item for item in items if item in out]
