"""Neighbour sampling in plain Python: what a batch looks like, given which edges each destination chooses."""

from collections import defaultdict


def sample(graph, seeds, fanouts, choose, disjoint):
    """The batch of a graph {(source type, name, target type): (indptr, indices)} of lists, as dicts of lists.

    choose(kind, tree, node, place, first, end, fanout) gives the chosen edges of one row.
    """
    kinds = list(graph)
    types = dict.fromkeys(kind[end] for kind in kinds for end in (0, -1)) | dict.fromkeys(seeds)
    node, tree, places = defaultdict(list), defaultdict(list), {}
    seed = 0
    for name, nodes in seeds.items():
        for v in nodes:
            at = seed if disjoint else 0
            places.setdefault((name, at, v), len(node[name]))
            node[name].append(v)
            tree[name].append(at)
            seed += 1
    begin = dict.fromkeys(types, 0)
    end = {name: len(node[name]) for name in types}
    row, col, edge = ({kind: [] for kind in kinds} for _ in range(3))
    nodes_per_hop = {name: [end[name]] for name in types}
    edges_per_hop = {kind: [] for kind in kinds}
    for hop in range(max(map(len, fanouts.values()))):
        for kind in kinds:
            source, _, target = kind
            indptr, indices = graph[kind]
            before = len(edge[kind])
            for i in range(begin[target], end[target]):
                v, t = node[target][i], tree[target][i]
                for k in choose(kind, t, v, i, indptr[v], indptr[v + 1], fanouts[kind][hop]):
                    key = (source, t, indices[k])
                    if key not in places:
                        places[key] = len(node[source])
                        node[source].append(indices[k])
                        tree[source].append(t)
                    row[kind].append(places[key])
                    col[kind].append(i)
                    edge[kind].append(k)
            edges_per_hop[kind].append(len(edge[kind]) - before)
        for name in types:
            begin[name], end[name] = end[name], len(node[name])
            nodes_per_hop[name].append(end[name] - begin[name])
    return dict(
        node={name: node[name] for name in types},
        row=row,
        col=col,
        edge=edge,
        batch={name: tree[name] for name in types} if disjoint else None,
        num_nodes_per_hop=nodes_per_hop,
        num_edges_per_hop=edges_per_hop,
    )


def chosen_in(edges, cols):
    """choose() that repeats what a batch {kind: list} has chosen."""
    by_row = defaultdict(list)
    for kind, of_kind in edges.items():
        for k, place in zip(of_kind, cols[kind], strict=True):
            by_row[kind, place].append(k)
    return lambda kind, tree, node, place, first, end, fanout: by_row[kind, place]


def everything(kind, tree, node, place, first, end, fanout):
    return range(first, end) if fanout else ()


def until(times, seed_times, last):
    """choose() of all edges that are early enough, or the latest of them; times(kind, k) is that of an edge."""

    def choose(kind, tree, node, place, first, end, fanout):
        early = [k for k in range(first, end) if times(kind, k) <= seed_times[tree]]
        return early[-fanout:] if last and fanout > 0 else early if fanout else []

    return choose
