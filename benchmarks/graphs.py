"""Synthetic stand-ins for the field's benchmark graphs (power-law degrees, planted communities).

Real data of this size cannot be shipped, so each stand-in matches the published number of nodes and
directed edges, the degree skew and, roughly, the community size of the graph it is named after. Say
"reddit-like", never "Reddit", when quoting a figure. A fixed seed makes the graph the same on every run
of one torch version and device; compare timings only between runs that print the same `checksum`.

`name:sorted` renumbers nodes so that communities are contiguous: what an ideal reordering would reach.
"""

import argparse

import numpy as np
import torch

# name: nodes, directed edges, power-law exponent (0: small molecules), max degree, community size, share inside
GRAPHS = {
    "pubmed-like": (19_717, 88_676, 2.9, 171, 50, 0.70),
    "arxiv-like": (169_343, 2_332_486, 2.4, 13_161, 170, 0.70),
    "artist-like": (50_515, 1_638_396, 2.5, 1_469, 100, 0.60),
    "blogcatalog-like": (88_784, 2_093_195, 2.1, 9_444, 900, 0.40),
    "amazon0505-like": (410_236, 4_878_874, 3.0, 2_760, 25, 0.80),
    "yeast-like": (1_714_644, 3_636_546, 0, 0, 21.54, 1.0),
    "proteins-like": (132_534, 79_122_504, 2.8, 7_750, 3_300, 0.80),
    "reddit-like": (232_965, 114_615_892, 2.3, 21_657, 2_300, 0.75),
    "products-like": (2_449_029, 123_718_280, 2.6, 17_481, 500, 0.80),
    "papers100M-like": (111_059_956, 3_231_371_744, 2.4, 25_000, 170, 0.70),  # for a small scale; as arxiv-like
}


def generate(name, device="cuda", scale=1.0, seed=1234):
    """Return dict(num_nodes, indptr int32 [n+1], indices int32 [nnz], community int32 [n], checksum int).

    The graph is symmetric, without self-loops or duplicate edges; row = destination. scale < 1 shrinks
    nodes and edges alike, for machines without a GPU.
    """
    base, _, suffix = name.partition(":")
    if base not in GRAPHS or suffix not in ("", "sorted"):
        raise ValueError(f"unknown graph {name!r}; expected one of {sorted(GRAPHS)} with an optional ':sorted'")
    n, nnz, alpha, max_degree, community_size, inside_share = GRAPHS[base]
    n, nnz = max(64, int(n * scale)), max(128, int(nnz * scale))
    if scale < 1:
        max_degree = max(8, min(max_degree, n // 4))
    nnz = min(nnz, int(n * n * 0.2))
    rng = torch.Generator(device=device)
    rng.manual_seed(seed + sum(map(ord, base)))
    if alpha == 0:
        key, community = _molecules(n, nnz // 2, community_size, rng, device)
    else:
        key, community = _communities(n, nnz // 2, alpha, max_degree, community_size, inside_share, rng, device)
    a, b = torch.div(key, n, rounding_mode="floor"), key % n
    if suffix == "sorted":
        new_id = torch.empty(n, dtype=torch.long, device=device)
        new_id[torch.argsort(community, stable=True)] = torch.arange(n, device=device)
        a, b, community = new_id[a], new_id[b], community.sort().values
    full = torch.cat([a * n + b, b * n + a]).sort().values
    row = torch.div(full, n, rounding_mode="floor")
    indices = (full - row * n).to(torch.int32)
    indptr = torch.zeros(n + 1, dtype=torch.int32, device=device)
    indptr[1:] = torch.bincount(row, minlength=n).cumsum(0).to(torch.int32)
    checksum = int((indices.long() * (torch.arange(indices.numel(), device=device) % 1009 + 1)).sum() % 1_000_003)
    return {
        "name": name,
        "num_nodes": n,
        "indptr": indptr,
        "indices": indices,
        "community": community.to(torch.int32),
        "checksum": checksum,
    }


def _uniform(m, rng, device):
    return torch.rand(m, generator=rng, device=device, dtype=torch.float64)


def _power_law_weights(n, alpha, max_ratio, rng, device):
    w = _uniform(n, rng, device).clamp_(1e-12).pow(-1.0 / (alpha - 1.0))
    for _ in range(30):
        w = torch.minimum(w, w.mean() * max_ratio)
    return (w / w.mean() * 65536).round().clamp_(1).long()  # integers: the prefix sums are exact, so reproducible


def _communities(n, half, alpha, max_degree, community_size, inside_share, rng, device):
    w = _power_law_weights(n, alpha, max_degree / (2 * half / n), rng, device)
    count = max(1, round(n / community_size))
    sizes = (
        (1e6 * torch.exp(0.6 * torch.randn(count, generator=rng, device=device, dtype=torch.float64)))
        .long()
        .clamp_(1)
        .cumsum(0)
    )
    community = torch.searchsorted(sizes, (_uniform(n, rng, device) * sizes[-1]).long(), right=True).clamp_(
        max=count - 1
    )
    order = torch.argsort(community, stable=True)
    cum = w[order].cumsum(0)
    size = torch.bincount(community, minlength=count)
    end = size.cumsum(0)
    zero = torch.zeros_like(end)
    hi = torch.where(size > 0, cum[(end - 1).clamp(min=0)], zero)
    lo = torch.where(end - size > 0, cum[(end - size - 1).clamp(min=0)], zero)
    key = torch.empty(0, dtype=torch.long, device=device)
    for attempt in range(25):
        missing = half - key.numel()
        if missing <= 0:
            break
        m = int(min(max(2 * missing, 1000), 60_000_000) if attempt else min(half * 1.1 + 100, 70_000_000))
        i = order[torch.searchsorted(cum, (_uniform(m, rng, device) * cum[-1]).long(), right=True).clamp_(max=n - 1)]
        c = community[i]
        inside = _uniform(m, rng, device) < inside_share
        t = _uniform(m, rng, device)
        t = torch.where(inside, lo[c] + (t * (hi[c] - lo[c])).long(), (t * cum[-1]).long())
        j = order[torch.searchsorted(cum, t, right=True).clamp_(max=n - 1)]
        new = (torch.minimum(i, j) * n + torch.maximum(i, j))[i != j]
        key = torch.unique(torch.cat([key, new]))
    if key.numel() > half:  # drop random pairs to hit the published count
        keep = torch.ones(key.numel(), dtype=torch.bool, device=device)
        keep[torch.randperm(key.numel(), generator=rng, device=device)[: key.numel() - half]] = False
        key = key[keep]
    return key, community


def _molecules(n, half, mean_size, rng, device):
    """Many small contiguous graphs: a random tree each, plus rings of six."""
    count = max(1, round(n / mean_size))
    size = (
        (mean_size + 6.0 * torch.randn(count, generator=rng, device=device, dtype=torch.float64))
        .round()
        .clamp_(4, 80)
        .long()
    )
    size = (size.double() * (n / size.sum().item())).floor().clamp_(3).long()
    size[: max(0, n - int(size.sum()))] += 1
    community = torch.repeat_interleave(torch.arange(count, device=device), size)[:n]
    if community.numel() < n:
        community = torch.cat([community, community[-1:].expand(n - community.numel())])
    first = torch.zeros(count, dtype=torch.long, device=device)
    first[1:] = torch.bincount(community, minlength=count).cumsum(0)[:-1]
    ids = torch.arange(n, device=device)
    local = ids - first[community]
    step = 1 + (_uniform(n, rng, device).pow(3) * local.clamp(max=3).double()).floor().long()
    child = local > 0
    a, b = ids[child], (ids - torch.minimum(step, local.clamp(min=1)))[child]
    ring = ids[local >= 5]
    ring = ring[torch.randperm(ring.numel(), generator=rng, device=device)[: max(0, half - a.numel())]]
    a, b = torch.cat([a, ring]), torch.cat([b, ring - 5])
    return torch.unique(torch.minimum(a, b) * n + torch.maximum(a, b)), community


def save(name, path, features, classes, scale=1.0):
    """Write a graph as a file that `gnnaccel compare --dataset` takes, with random features, labels and masks."""
    made = generate(name, "cuda" if torch.cuda.is_available() else "cpu", scale)
    made = {key: value.cpu() if torch.is_tensor(value) else value for key, value in made.items()}
    n, rng = made["num_nodes"], torch.Generator().manual_seed(0)
    target = torch.repeat_interleave(torch.arange(n, dtype=torch.int32), made["indptr"].diff())
    part = torch.rand(n, generator=rng)
    masks = {"train_mask": part < 0.6, "val_mask": (part >= 0.6) & (part < 0.8), "test_mask": part >= 0.8}
    arrays = {
        "edge_index": torch.stack([made["indices"], target]),
        "x": torch.rand(n, features, generator=rng),
        "y": torch.randint(classes, (n,), generator=rng),
        **masks,
    }
    np.savez(path, num_nodes=n, **{key: value.numpy() for key, value in arrays.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="List the graphs, or write one for `gnnaccel compare --dataset`.")
    parser.add_argument("name", nargs="?", help="one of them, with an optional :sorted")
    parser.add_argument("path", nargs="?", help="file.npz to write it to")
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--classes", type=int, default=40)
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args()
    if args.path:
        save(args.name, args.path, args.features, args.classes, args.scale)
        raise SystemExit
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in [args.name] if args.name else GRAPHS:
        g = generate(name, device, scale=args.scale if device == "cuda" else 0.01)
        degree = g["indptr"].diff()
        print(
            f"{name:18s} nodes {g['num_nodes']:>9,} edges {g['indices'].numel():>11,} "
            f"mean degree {degree.float().mean():7.2f} max {int(degree.max()):>6,} checksum {g['checksum']}"
        )
