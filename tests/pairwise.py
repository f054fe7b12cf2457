"""Of a test over three or more lists of parameters, the fewest cases that hold every pair of values; `--all` runs all.

Most faults need one value or two that meet. A test over one list or two keeps all its cases. Pairs are counted for
each device apart, as CUDA is skipped where there is none.
"""

from itertools import combinations


def covering(cases):
    """Indices of cases, tuples of one length, with each pair of values that any case holds: the same on every call."""
    pairs = [set(combinations(enumerate(case), 2)) for case in cases]
    missing, kept = set().union(*pairs), []
    while missing:
        best = max(range(len(cases)), key=lambda k: len(pairs[k] & missing))
        kept.append(best)
        missing -= pairs[best]
    return sorted(kept)


def thinned(items):
    """Collected tests: those that run, and those that are left out."""
    groups, out = {}, set()
    for item in items:
        if spec := getattr(item, "callspec", None):
            groups.setdefault((item.nodeid.partition("[")[0], spec.params.get("device")), []).append(item)
    for group in groups.values():
        cases = [tuple(item.callspec._idlist) for item in group]  # an id of each list of parameters
        if sum(len(set(ids)) > 1 for ids in zip(*cases, strict=True)) > 2:
            out |= set(group) - {group[k] for k in covering(cases)}
    return [item for item in items if item not in out], [item for item in items if item in out]
