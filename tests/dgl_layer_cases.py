"""Every module of dgl.nn.pytorch, with its options."""

from __future__ import annotations

from functools import partial

import torch
from dgl_compare import FRAMEWORK, HOMOGENEOUS, PARTLY, Case, dgl
from dgl_function_cases import DENSE
from torch import nn

import dgl.nn.pytorch as dglnn  # isort: skip  (after the shim)

_NO_MESSAGES = "no message passing: operations of torch"


def _types(count: int, kinds: int) -> torch.Tensor:
    return torch.arange(count) % kinds


def _forward(module, g, *inputs):
    return module(g, *inputs)


def _mlp(n_in=6, n_out=4):
    return nn.Linear(n_in, n_out)


def layer_cases() -> dict[str, Case]:
    found = {}

    def add(name, inputs, *make_args, call=_forward, options=None, group="layers", note="", **case):
        make = partial(getattr(dglnn, name), *make_args, **(options or {}))
        shown = [repr(a) for a in make_args if isinstance(a, str)]
        shown += [f"{k}={v!r}" for k, v in (options or {}).items() if isinstance(v, int | float | str | tuple | list)]
        shown += [k for k, v in (options or {}).items() if not isinstance(v, int | float | str | tuple | list)]
        title = name + (f"({', '.join(shown)})" if shown else "")
        found[title + note] = Case(group, call, inputs, make, **case)

    _convolutions(add)
    _attention(add)
    _relational(add)
    _edge_features(add)
    _pooling(add)
    _other(add)
    _explainers(found)
    for name in ("CuGraphGATConv", "CuGraphRelGraphConv", "CuGraphSAGEConv"):
        reason = "needs CUDA and pylibcugraphops"
        found[name] = Case("layers", partial(_refused, name), graphs=("int64",), expect=FRAMEWORK, reason=reason)
    return found


def _refused(name, g):
    try:
        getattr(dglnn, name)(6, 4, 2)
    except ModuleNotFoundError:
        return ()


def _convolutions(add):
    weighted = lambda m, g, x, w: m(g, x, edge_weight=w.abs())  # noqa: E731
    forward = dict(no_backward=("edgeless",))
    for norm in ("both", "right", "left", "none"):
        add("GraphConv", ("n 6",), 6, 4, options=dict(norm=norm))
        add("GraphConv", ("n 3",), 3, 8, options=dict(norm=norm, allow_zero_in_degree=True))
    add("GraphConv", ("n 6", "e"), 6, 4, call=weighted, note=" with edge weights")
    add("GraphConv", ("n 6", "k 6 4"), 6, 4, options=dict(weight=False, bias=False),
        call=lambda m, g, x, w: m(g, x, weight=w))  # fmt: skip
    for norm in ("both", "right", "none"):
        add("EdgeWeightNorm", ("e",), norm, 1e-3, call=lambda m, g, w: m(g, w.abs()))
    for aggregator in ("mean", "gcn", "pool", "lstm"):
        left = {"lstm": dict(expect=PARTLY, reason="new_zeros() of a mailbox"), "pool": forward}.get(aggregator, {})
        add("SAGEConv", ("n 6",), 6, 4, aggregator, **left)
    add("SAGEConv", ("n 3", "e"), 3, 5, "mean", call=weighted, note=" with edge weights")
    for aggregator in ("sum", "max", "mean"):
        options = dict(aggregator_type=aggregator, learn_eps=True)
        last = forward if aggregator == "max" else {}
        add("GINConv", ("n 6",), _mlp(), options=options, **last)
        add("GINConv", ("n 6", "e"), None, options=options, call=weighted, note=" with edge weights", **last)
    add("GINEConv", ("n 6", "e 6"), _mlp())
    for k in (1, 3):
        add("TAGConv", ("n 6",), 6, 4, options=dict(k=k), graphs=HOMOGENEOUS)
        add("SGConv", ("n 6",), 6, 4, options=dict(k=k, allow_zero_in_degree=True), graphs=HOMOGENEOUS)
    for name in ("TAGConv", "SGConv"):
        add(name, ("n 6", "e"), 6, 4, call=weighted, graphs=HOMOGENEOUS, note=" with edge weights")
    add("SGConv", ("n 6",), 6, 4, options=dict(k=2, cached=True), graphs=HOMOGENEOUS,
        call=lambda m, g, x: (m(g, x), m(g, x)))  # fmt: skip
    # DGL alone mixes float32 weights into whatever APPNPConv and LabelPropagation get, and refuses them.
    single = dict(dtype=torch.float32, tolerance=1e-4, graphs=HOMOGENEOUS)
    add("APPNPConv", ("n 6",), 3, 0.2, **single)
    add("APPNPConv", ("n 6",), 3, 0.2, options=dict(edge_drop=0.5), **single)
    add("APPNPConv", ("n 6", "e"), 3, 0.2, call=weighted, note=" with edge weights", **single)
    lambdas = lambda m, g, x: m(g, x, torch.full((g.batch_size,), 2.0, dtype=x.dtype))  # noqa: E731
    for k in (1, 2, 3):
        add("ChebConv", ("n 6",), 6, 4, k, call=lambdas, options=dict(activation=torch.tanh), note=f" of order {k}",
            graphs=HOMOGENEOUS, **(dict(expect=FRAMEWORK, reason=_NO_MESSAGES) if k == 1 else {}))  # fmt: skip
    add("GCN2Conv", ("n 6", "u 6"), 6, 2, graphs=HOMOGENEOUS, options=dict(allow_zero_in_degree=True))
    add("GCN2Conv", ("n 6", "u 6", "e"), 6, 2, graphs=HOMOGENEOUS, options=dict(project_initial_features=False),
        call=lambda m, g, x, x0, w: m(g, x, x0, edge_weight=w.abs()))  # fmt: skip
    add("GatedGraphConv", ("n 6",), 6, 6, 2, 1, graphs=HOMOGENEOUS)
    add("GatedGraphConv", ("n 4",), 4, 6, 2, 3, graphs=HOMOGENEOUS, note=" with 3 edge types",
        call=lambda m, g, x: m(g, x, _types(g.num_edges(), 3)))  # fmt: skip
    add("GatedGraphConv", ("n 4",), 4, 6, 2, 9, graphs=HOMOGENEOUS, note=" with 9 edge types, some without edges",
        call=lambda m, g, x: m(g, x, _types(g.num_edges(), 4) * 2))  # fmt: skip
    add("TWIRLSConv", ("n 6",), 6, 4, 6, 3, **single)
    add("TWIRLSConv", ("n 6",), 6, 4, 6, 3, options=dict(precond=False, alp=0.5), **single)
    add("TWIRLSConv", ("n 6",), 6, 4, 6, 4, options=dict(attention=True, use_eta=True), **single)
    add("TWIRLSUnfoldingAndAttention", ("n 6",), 6, 0.5, 1.0, 3, **single)
    for k, options in ((1, {}), (3, dict(norm_type="row", normalize=True)), (2, dict(clamp=False, reset=True))):
        add("LabelPropagation", ("n 5",), k, 0.5, options=options, note=f" of {k} steps", **single)


def _attention(add):
    add("GATConv", ("n 6",), 6, 3, 4, options=dict(residual=True))
    add("GATConv", ("n 6",), 6, 5, 1, options=dict(activation=torch.tanh, negative_slope=0.1, bias=False))
    add("GATConv", ("n 6",), 6, 4, 3, options=dict(feat_drop=0.5, attn_drop=0.5, allow_zero_in_degree=True))
    add("GATConv", ("n 6", "e"), 6, 3, 2, call=lambda m, g, x, w: m(g, x, edge_weight=w), note=" with edge weights")
    add("GATConv", ("n 6",), 6, 3, 2, call=partial(_with_attention), note=" with its attention")
    add("GATConv", ("u 6", "v 5"), (6, 5), 3, 2, call=lambda m, g, x, y: m(g, (x, y)), note=" of a pair")
    add("GATv2Conv", ("n 6",), 6, 3, 2)
    add("GATv2Conv", ("n 6",), 6, 3, 2, options=dict(share_weights=True, residual=True, attn_drop=0.3))
    add("GATv2Conv", ("n 6",), 6, 3, 2, call=_with_attention, note=" with its attention")
    add("AGNNConv", ("n 6",), options=dict(learn_beta=True))
    add("AGNNConv", ("n 6",), options=dict(allow_zero_in_degree=True))
    add("DotGatConv", ("n 6",), 6, 4, 2)
    add("DotGatConv", ("n 6",), 6, 4, 2, call=_with_attention, note=" with its attention")
    add("EdgeGATConv", ("n 6", "e 3"), 6, 3, 4, 2)
    add("EdgeGATConv", ("n 6", "e 3"), 6, 3, 4, 2, call=_with_attention, options=dict(residual=False))
    add("EGATConv", ("n 6", "e 3"), 6, 3, 4, 5, 2)
    add("EGATConv", ("n 6", "e 3", "e"), 6, 3, 4, 5, 2, note=" with edge weights",
        call=lambda m, g, x, e, w: m(g, x, e, edge_weight=w, get_attention=True))  # fmt: skip


def _with_attention(module, g, *inputs):
    return module(g, *inputs, get_attention=True)


def _relational(add):
    types = lambda m, g, x: m(g, x, _types(g.num_edges(), 3).to(x.device))  # noqa: E731
    sorted_types = lambda m, g, x: m(g, x, _types(g.num_edges(), 3).sort()[0], presorted=True)  # noqa: E731
    normed = lambda m, g, x, w: m(g, x, _types(g.num_edges(), 3), w.abs())  # noqa: E731
    for regularizer in (None, "basis", "bdd"):
        options = dict(regularizer=regularizer, num_bases=2) if regularizer else dict(self_loop=False)
        add("RelGraphConv", ("n 6",), 6, 4, 3, call=types, options=options, graphs=HOMOGENEOUS)
        add("RelGraphConv", ("n 6",), 6, 4, 3, call=sorted_types, options=options, note=" sorted", graphs=HOMOGENEOUS)
    add("RelGraphConv", ("n 6", "e 1"), 6, 12, 3, call=normed, note=" with norm", graphs=HOMOGENEOUS)
    add("RelGraphConv", ("n 6",), 6, 4, 3, call=types, options=dict(layer_norm=True, dropout=0.5), graphs=HOMOGENEOUS)
    for regularizer, more in (("basis", dict(layer_norm=True, bias=False)), ("bdd", dict(activation=torch.tanh))):
        options = dict(regularizer=regularizer, num_bases=2, self_loop=regularizer == "bdd", dropout=0.3, **more)
        add("RelGraphConv", ("n 6",), 6, 4, 3, call=types, options=options, graphs=HOMOGENEOUS)
    add("RelGraphConv", ("n 6", "e 1"), 6, 4, 3, call=normed, note=" with norm", graphs=HOMOGENEOUS,
        options=dict(regularizer="basis", num_bases=2, layer_norm=True, self_loop=False))  # fmt: skip
    for options in (dict(dropout=0.0), dict(dropout=0.2, use_norm=True)):
        add("HGTConv", ("n 6",), 6, 3, 2, 2, 3, options=options, call=_hgt, graphs=HOMOGENEOUS)
    add("HGTConv", ("n 6",), 6, 3, 2, 2, 3, call=partial(_hgt, presorted=True), note=" sorted", graphs=HOMOGENEOUS)
    dense = dict(group="other modules", graphs=("int64",))
    of_nodes = lambda m, g, x: m(x, _types(x.shape[0], 3))  # noqa: E731
    for options in ({}, dict(regularizer="basis", num_bases=2), dict(regularizer="bdd", num_bases=2)):
        add("TypedLinear", ("n 6",), 6, 4, 3, call=of_nodes, options=options, **dense)
        add("TypedLinear", ("n 6",), 6, 4, 3, options=options, note=" sorted",
            call=lambda m, g, x: m(x, _types(x.shape[0], 3).sort()[0], sorted_by_type=True), **dense)  # fmt: skip


def _hgt(module, g, x, presorted=False):
    nodes, edges = _types(g.num_nodes(), 2), _types(g.num_edges(), 3)
    return module(g, x, nodes.sort()[0] if presorted else nodes, edges.sort()[0] if presorted else edges,
                  presorted=presorted)  # fmt: skip


def _edge_features(add):
    forward = dict(no_backward=("edgeless",))
    for aggregator in ("sum", "mean", "max"):
        options, last = dict(aggregator_type=aggregator), forward if aggregator == "max" else {}
        add("NNConv", ("n 6", "e 3"), 6, 4, nn.Linear(3, 24), options=options, **last)
        add("GMMConv", ("n 6", "e 2"), 6, 4, 2, 3, options=dict(**options, allow_zero_in_degree=True), **last)
    add("NNConv", ("n 6", "e 3"), 6, 4, nn.Linear(3, 24), options=dict(residual=True, bias=False))
    add("GMMConv", ("n 6", "e 2"), 6, 4, 2, 3, options=dict(residual=True))
    add("GatedGCNConv", ("n 6", "e 3"), 6, 3, 4, graphs=HOMOGENEOUS)
    add("GatedGCNConv", ("n 6", "e 6"), 6, 6, 6, options=dict(batch_norm=False, dropout=0.5), graphs=HOMOGENEOUS)
    add("EdgeConv", ("n 6",), 6, 4)
    add("EdgeConv", ("n 6",), 6, 4, options=dict(batch_norm=True, allow_zero_in_degree=True), **forward)
    add("CFConv", ("n 6", "e 3"), 6, 3, 5, 4)
    add("EGNNConv", ("n 6", "n 3"), 6, 32, 4, graphs=HOMOGENEOUS)
    add("EGNNConv", ("n 6", "n 3", "e 2"), 6, 32, 4, 2, graphs=HOMOGENEOUS, note=" with edge features")
    for used in (None, torch.tensor([6.0, 8.0])):
        ones = [torch.ones(3) for _ in range(3)]
        add("AtomicConv", ("n 1", "e 1"), *ones, options={} if used is None else dict(features_to_use=used),
            call=lambda m, g, x, d: m(g, x, d.abs()), graphs=HOMOGENEOUS)  # fmt: skip
    both = dict(graphs=HOMOGENEOUS)
    every = ["mean", "max", "min", "sum", "std", "var", "moment3", "moment4", "moment5"]
    scalers = ["identity", "amplification", "attenuation"]
    # Of two messages the third and fifth moments are roots of what is left of a difference of equal numbers.
    loose = {**both, "tolerance": 1e-3}
    add("PNAConv", ("n 6",), 6, 4, every, scalers, 2.5, note=" with every aggregator", **loose)
    add("PNAConv", ("n 6", "e 3"), 6, 6, ["mean"], scalers, 2.5, options=dict(num_towers=2, edge_feat_size=3), **both)
    directed = ["dir1-av", "dir1-dx", "dir2-av", "dir2-dx", "sum"]
    add("DGNConv", ("n 6", "u 2"), 6, 4, directed, scalers, 2.5, call=lambda m, g, x, v: m(g, x, eig_vec=v), **both)
    add("DGNConv", ("n 6", "e 3", "u 2"), 6, 4, ["dir1-av"], scalers, 2.5, options=dict(edge_feat_size=3),
        call=lambda m, g, x, e, v: m(g, x, e, v), **both)  # fmt: skip


def _pooling(add):
    given = dict(group="readout modules", graphs=("batched", "int64", "int32", "edgeless"))
    for name in ("SumPooling", "AvgPooling", "MaxPooling"):
        add(name, ("n 6",), **given)
    add("WeightAndSum", ("n 6",), 6, **given)
    add("GlobalAttentionPooling", ("n 6",), nn.Linear(6, 1), nn.Linear(6, 5), **given)
    add("GlobalAttentionPooling", ("n 6",), nn.Linear(6, 1), call=_with_attention, note=" with its attention", **given)
    add("Set2Set", ("n 6",), 6, 3, 2, **given)
    left = dict(given, expect=FRAMEWORK)
    add("SortPooling", ("n 6",), 3, **left, reason="no message passing: sorts and gathers of torch")
    reason = "no message passing: attention over padded batches"
    for kind, m in (("sab", None), ("isab", 3)):
        add("SetTransformerEncoder", ("n 6",), 6, 2, 3, 8, options=dict(block_type=kind, m=m), **left, reason=reason)
    add("SetTransformerDecoder", ("n 6",), 6, 2, 3, 8, 1, 2, **left, reason=reason)


def _other(add):
    """Containers, models of links, transformers, embeddings, generators of graphs, explainers."""
    group = dict(group="other modules", graphs=("int64",))
    plain = dict(group, expect=FRAMEWORK, reason=_NO_MESSAGES)
    stack = [dglnn.GraphConv(6, 5, allow_zero_in_degree=True), dglnn.SAGEConv(5, 4, "mean")]
    add("Sequential", ("n 6",), *stack, graphs=HOMOGENEOUS, group="other modules")
    add("Sequential", ("n 6",), *stack, call=lambda m, g, x: m([g, dgl.reverse(g)], x), note=" on two graphs", **group)
    add("GroupRevRes", ("n 6",), dglnn.SAGEConv(3, 3, "mean"), **group, call=lambda m, g, x: m(g, x * 1))
    add("JumpingKnowledge", ("n 6", "n 6"), "lstm", 6, 2, call=lambda m, g, *xs: m(list(xs)), **plain)
    add("WeightBasis", (), (3, 4), 2, 5, call=lambda m, g: m(), **plain)
    for op in ("cos", "dot", "ele", "cat"):
        sizes = {} if op in ("cos", "dot") else dict(in_feats=6, out_feats=2)
        add("EdgePredictor", ("n 6", "n 6"), op, options=sizes, call=lambda m, g, x, y: m(x, y), **plain)
    link = lambda m, g, x, y: m(x, y, _types(x.shape[0], 3))  # noqa: E731
    add("TransE", ("n 6", "n 6"), 3, 6, call=link, **plain)
    add("TransR", ("n 6", "n 6"), 3, 4, 6, call=link, **plain)
    add("BiasedMHA", ("k 2 5 8", "k 2 5 5 2"), 8, 2, call=lambda m, g, x, b: m(x, b), **plain)
    add("GraphormerLayer", ("k 2 5 8", "k 2 5 5 2"), 8, 6, 2, call=lambda m, g, x, b: m(x, b), **plain)
    add("EGTLayer", ("k 2 5 8", "k 2 5 5 4"), 8, 4, 2, 0, call=lambda m, g, x, e: m(x, e), **plain)
    add("DegreeEncoder", (), 5, 4, options=dict(direction="in"), **plain,
        call=lambda m, g: m(g.in_degrees().view(1, -1)))  # fmt: skip
    add(
        "LapPosEncoder",
        ("k 5 3", "k 5 3"),
        "Transformer",
        2,
        3,
        4,
        call=lambda m, g, a, b: m(a, b),
        dtype=torch.float32,
        **plain,
    )
    add("PathEncoder", ("k 1 4 4 2 3",), 2, 3, **plain,
        call=lambda m, g, p: m(torch.ones(1, 4, 4, dtype=torch.long), p))  # fmt: skip
    add("SpatialEncoder", (), 3, call=lambda m, g: m(torch.arange(9).view(1, 3, 3) % 4), **plain)
    add("SpatialEncoder3d", ("k 2 4 3",), 5, call=lambda m, g, x: m(x), **plain)
    dense = dict(plain, reason=DENSE)
    matrix = lambda m, g, x, *more: m(g.adj_external().to_dense().to(x), x, *more)  # noqa: E731
    for name in ("DenseGraphConv", "DenseSAGEConv"):
        add(name, ("n 6",), 6, 4, call=matrix, **dense)
    add("DenseChebConv", ("n 6",), 6, 4, 2, call=lambda m, g, x: matrix(m, g, x, 2.0), **dense)


class _Classifier(nn.Module):
    """What the explainers explain: a model of a graph that takes edge weights."""

    def __init__(self):
        super().__init__()
        self.conv, self.classify = dglnn.GraphConv(6, 5, allow_zero_in_degree=True), nn.Linear(5, 2)

    def forward(self, graph, feat, embed=False, edge_weight=None, eweight=None):
        with graph.local_scope():
            hidden = torch.tanh(self.conv(graph, feat, edge_weight=eweight if edge_weight is None else edge_weight))
            if embed:
                return hidden
            graph.ndata["h"] = hidden
            return self.classify(dgl.mean_nodes(graph, "h"))


class _HeteroClassifier(nn.Module):
    """The same of a graph of several types of edges."""

    def __init__(self, etypes):
        super().__init__()
        self.convs = nn.ModuleDict({"/".join(t): dglnn.GraphConv(6, 5, allow_zero_in_degree=True) for t in etypes})
        self.classify = nn.Linear(5, 2)

    def forward(self, graph, feat, embed=False, edge_weight=None, eweight=None):
        weights = eweight if edge_weight is None else edge_weight
        hidden = {}
        for t in graph.canonical_etypes:
            weight = None if weights is None else weights[t]
            out = self.convs["/".join(t)](graph[t], (feat[t[0]], feat[t[2]]), edge_weight=weight)
            hidden[t[2]] = hidden.get(t[2], 0) + torch.tanh(out)
        if embed:
            return hidden
        with graph.local_scope():
            graph.ndata["h"] = hidden
            return self.classify(sum(dgl.mean_nodes(graph, "h", ntype=n) for n in graph.ntypes))


def _explainers(found):
    """They train on a model's results, so what is compared is the masks; gradients stay inside. PGExplainer wants
    each edge to have its reverse."""

    def explain(g, x):
        torch.manual_seed(3)
        with torch.enable_grad():
            explainer = dglnn.GNNExplainer(_Classifier(), 1, num_epochs=3, log=False)
            return explainer.explain_graph(g, x.detach())

    def explain_hetero(g, *inputs):
        torch.manual_seed(3)
        with torch.enable_grad():
            model = _HeteroClassifier(g.canonical_etypes)
            explainer = dglnn.HeteroGNNExplainer(model, 1, num_epochs=3, log=False)
            masks = explainer.explain_graph(g, dict(zip(g.ntypes, inputs, strict=True)))
        return [mask for each in masks for _, mask in sorted(each.items())]

    def train(g, explainer, feat):
        """The loss of a step of training, and the explanation after it."""
        optimizer = torch.optim.SGD(explainer.parameters(), 0.1)
        with torch.enable_grad():
            loss = explainer.train_step(g, feat, 1.0)
            loss.backward()
        optimizer.step()
        prob, mask = explainer.explain_graph(g, feat)
        masks = [mask] if isinstance(mask, torch.Tensor) else [mask[t] for t in sorted(mask)]
        return [t.detach() for t in (loss, prob, *masks)]

    def parametrize(g, x):
        torch.manual_seed(3)
        both = dgl.to_bidirected(g.cpu()).to(g.device)  # DGL takes graphs on the CPU alone
        return train(both, dglnn.PGExplainer(_Classifier(), 5), x.detach())

    def parametrize_hetero(g, *inputs):
        torch.manual_seed(3)
        u, v = g.edges(etype="plays")
        counts = {n: g.num_nodes(n) for n in ("game", "user")}
        both = dgl.heterograph({("user", "plays", "game"): (u, v), ("game", "of", "user"): (v, u)}, counts)
        explainer = dglnn.HeteroPGExplainer(_HeteroClassifier(both.canonical_etypes), 5)
        return train(both, explainer, {n: x.detach() for n, x in zip(both.ntypes, inputs, strict=True)})

    single = dict(dtype=torch.float32, tolerance=1e-3)
    found["GNNExplainer"] = Case("explainers", explain, ("u 6",), graphs=("int64",), **single)
    found["PGExplainer"] = Case("explainers", parametrize, ("u 6",), graphs=("int64",), **single)
    types = ("game 6", "store 6", "user 6")  # as the graph lists them
    found["HeteroGNNExplainer"] = Case("explainers", explain_hetero, types, graphs=("ring",), **single)
    found["HeteroPGExplainer"] = Case(
        "explainers", parametrize_hetero, (types[0], types[2]), graphs=("ring",), **single
    )
