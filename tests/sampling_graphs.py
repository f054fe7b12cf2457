"""For the tests of samplers: graphs, batches as lists, and how far counts are from what is expected."""

import torch
from scipy.stats import chi2

KINDS = {("a", "to", "a"): (40, 40), ("a", "of", "b"): (40, 30), ("b", "by", "a"): (30, 40), ("c", "in", "b"): (20, 30)}
INDPTR, INDICES, SEEDS = torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 2]), torch.tensor([0, 1])


def csc(num_sources, num_targets, num_edges, dtype=torch.int64, times=None):
    """A random graph by destination, some of them without edges, one a hub; sources in order of time where given."""
    target = torch.randint(num_targets, (num_edges,)).where(torch.rand(num_edges) < 0.8, torch.tensor(1))
    target[target % 7 == 3] = 1
    source = torch.randint(num_sources, (num_edges,))
    keys = source if times is None else times[source]
    order = keys.argsort(stable=True)
    order = order[target[order].argsort(stable=True)]
    indptr = torch.zeros(num_targets + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(target, minlength=num_targets).cumsum(0)
    return indptr.to(dtype), source[order].to(dtype)


def hetero(dtype=torch.int64, times=None):
    return {kind: csc(*sizes, 300, dtype, (times or {}).get(kind[0])) for kind, sizes in KINDS.items()}


def lists(graph):
    return {kind: tuple(array.tolist() for array in arrays) for kind, arrays in graph.items()}


def plain(out):
    """A batch as dicts of lists."""
    return {
        name: None if value is None else {k: v if isinstance(v, list) else v.tolist() for k, v in value.items()}
        for name, value in out._asdict().items()
    }


def p_value(counts, expected):
    counts, expected = torch.as_tensor(counts).double(), torch.as_tensor(expected).double()
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    return chi2.sf(float(((counts - expected) ** 2 / expected).sum()), counts.numel() - 1)
