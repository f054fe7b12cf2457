"""Random layers of PyG: for each class a function of a Draw and two widths that gives a layer and its arguments.

Arguments are named, and made by fuzz.layers: "x" features of nodes, or of sources and destinations; "xx" of one set of
nodes alone, "xx:N" of this width; "index" edges; "weight?" numbers of edges, or not; "attr N" N features of
edges; "type" relations; "hetero" dictionaries of features and edges for METADATA.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import Linear, Sequential, Tanh
from torch_geometric import nn

from fuzz.draw import Draw

TYPES = 3
METADATA = ["a", "b"], [("a", "x", "b"), ("b", "y", "a"), ("a", "z", "a")]
_AGGREGATIONS = ("sum", "mean", "max", "min", "mul", "std", "var", "median", ["mean", "max"], ["sum", "std", "min"])


def _mlp(inputs: int, outputs: int):
    """Smooth: no rounding passes a kink of it."""
    return Sequential(Linear(inputs, 6), Tanh(), Linear(6, outputs))


def _aggr(d: Draw, few: bool = False):
    return d.pick(_AGGREGATIONS[:4] if few else _AGGREGATIONS)


def _flags(d: Draw, *names: str) -> dict:
    """Each of these options on, off or left out."""
    return {name: d.chance(0.5) for name in names if d.chance(0.6)}


def _flow(d: Draw) -> dict:
    return {"flow": "target_to_source"} if d.chance(0.15) else {}


def _heads(d: Draw) -> dict:
    return {"heads": d.randint(1, 5), **_flags(d, "concat")}


def _dropout(d: Draw) -> dict:
    return {"dropout": d.pick((0.0, 0.3, 0.6))} if d.chance(0.3) else {}


def _edge_dim(d: Draw, fills: bool = False) -> tuple[dict, str]:
    """Edge features, and how the call names them; `fills`: with what self-loops that are added get."""
    width = d.randint(1, 5)
    fill = {"fill_value": d.pick(("mean", "add", "max", "min", 0.5))} if fills and d.chance(0.5) else {}
    return ({"edge_dim": width, **fill}, f" attr {width}") if d.chance(0.4) else ({}, "")


def _gcn(d, i, o):
    options = _flags(d, "improved", "cached", "add_self_loops", "normalize", "bias") | _flow(d)
    if options.get("normalize") is False:
        options["add_self_loops"] = False
    return nn.GCNConv(i, o, **options), "xx index weight?"


def _sage(d, i, o):
    options = _flags(d, "normalize", "root_weight", "project", "bias") | _flow(d)
    pair, aggr = d.chance(0.3), _aggr(d)
    if aggr in ("var", "std"):  # of one neighbour it is rounding alone, which normalising without a root would show
        options.pop("normalize", None)
    return nn.SAGEConv((i, i) if pair else i, o, aggr=aggr, **options), "x index"


def _gat(d, i, o):
    options, attr = _edge_dim(d, True)
    options |= _heads(d) | _dropout(d) | _flags(d, "add_self_loops", "bias", "residual") | _flow(d)
    options["negative_slope"] = d.pick((0.2, 0.0, 1.0))
    both = attr or d.chance(0.5)
    return nn.GATConv((i, i) if both and d.chance(0.5) else i, o, **options), "x index" + attr


def _gatv2(d, i, o):
    options, attr = _edge_dim(d, True)
    options |= _heads(d) | _dropout(d) | _flags(d, "add_self_loops", "bias", "share_weights", "residual") | _flow(d)
    return nn.GATv2Conv(i, o, **options), "x index" + attr


def _transformer(d, i, o):
    options, attr = _edge_dim(d)
    options |= _heads(d) | _dropout(d) | _flags(d, "beta", "bias", "root_weight") | _flow(d)
    return nn.TransformerConv(i, o, **options), "x index" + attr


def _gine(d, i, o):
    width = d.pick((i, 3))
    options = {} if width == i else {"edge_dim": width}
    return nn.GINEConv(_mlp(i, o), aggr=_aggr(d, True), **options, **_flags(d, "train_eps")), f"x index attr {width}"


def _gen(d, i, o):
    options, attr = _edge_dim(d)
    aggr = d.pick(("softmax", "powermean", "add", "max"))
    learned = {"learn_t": d.chance(0.5)} if aggr == "softmax" else {}
    return nn.GENConv(i, o, aggr=aggr, **options, **learned, **_flags(d, "msg_norm", "learn_msg_scale")), (
        "x index" + attr
    )


def _general(d, i, o):
    width = d.randint(1, 5) if d.chance(0.5) else None
    options = _flags(d, "directed_msg", "skip_linear", "l2_normalize")
    if d.chance(0.5):
        kind = d.pick(("additive", "dot_product"))
        options |= {"attention": True, "heads": d.randint(1, 4), "attention_type": kind}
    attr = f" attr {width}" if width else ""
    return nn.GeneralConv(i, o, in_edge_channels=width, aggr=_aggr(d, True), **options), "x index" + attr


def _rgcn(d, i, o):
    kind = d.randrange(3)
    i, o = (2 * i, 2 * o) if kind == 2 else (i, o)
    options = ({}, {"num_bases": 2}, {"num_blocks": 2})[kind]
    layer = d.pick((nn.RGCNConv, nn.RGCNConv, nn.FastRGCNConv)) if kind < 2 else nn.RGCNConv
    options |= {"aggr": d.pick(("mean", "sum"))} | _flags(d, "root_weight", "bias")
    return layer(i, o, TYPES, **options), f"xx:{i} index type"


def _eg(d, i, o):
    heads = d.randint(1, 4)
    aggregators = d.sample(("sum", "mean", "symnorm", "min", "max", "var", "std"), d.randint(1, 4))
    options = _flags(d, "cached", "add_self_loops", "bias")
    return nn.EGConv(i, o * heads, num_heads=heads, num_bases=d.randint(1, 4), aggregators=aggregators, **options), (
        "xx index"
    )


def _pna(d, i, o):
    towers, width = d.randint(1, 3), d.randint(1, 4) if d.chance(0.4) else None
    aggregators = d.sample(("mean", "min", "max", "sum", "std", "var"), d.randint(1, 4))
    scalers = d.sample(("identity", "amplification", "attenuation", "linear"), d.randint(1, 3))
    degrees = torch.tensor([1, 4, 8, 9, 5, 3])
    options = dict(towers=towers, edge_dim=width, **_flags(d, "divide_input"))
    attr = f" attr {width}" if width else ""
    return nn.PNAConv(i * towers, o * towers, aggregators, scalers, degrees, **options), f"xx:{i * towers} index{attr}"


def _super_gat(d, i, o):
    options = _heads(d) | _dropout(d) | _flags(d, "add_self_loops", "bias")
    return nn.SuperGATConv(i, o, attention_type=d.pick(("MX", "SD")), **options), "xx index"


def _hypergraph(d, i, o):
    if d.chance(0.4):
        return nn.HypergraphConv(i, o, use_attention=True, **_heads(d)), "xx hyper none hyperattr"
    return nn.HypergraphConv(i, o, **_flags(d, "bias")), "xx hyper hyperweight?"


def _rgat(d, i, o):
    options = dict(
        attention_mechanism=d.pick(("across-relation", "within-relation")),
        attention_mode=d.pick(("additive-self-attention", "multiplicative-self-attention")),
        heads=d.randint(1, 3),
        dim=1,
    )
    return nn.RGATConv(i, o, TYPES, **options), "xx index type"


def _res_gated(d, i, o):
    options, attr = _edge_dim(d)
    return nn.ResGatedGraphConv(i, o, **options, **_flags(d, "root_weight", "bias")), "x index" + attr


def _film(d, i, o):
    relations = d.pick((1, TYPES))
    return nn.FiLMConv(i, o, num_relations=relations, act=Tanh(), aggr=_aggr(d, True)), (
        "x index" + (" type" if relations > 1 else "")
    )


def _nn(d, i, o):
    width = d.randint(1, 4)
    return nn.NNConv(i, o, _mlp(width, i * o), aggr=_aggr(d, True), **_flags(d, "root_weight", "bias")), (
        f"x index attr {width}"
    )


def _gmm(d, i, o):
    width = d.randint(1, 4)
    options = _flags(d, "separate_gaussians", "root_weight", "bias")
    return nn.GMMConv(i, o, dim=width, kernel_size=d.randint(1, 4), aggr=_aggr(d, True), **options), (
        f"x index attr {width}"
    )


def _cg(d, i, o):
    width = d.randint(0, 4)
    options = dict(dim=width, aggr=_aggr(d, True), **_flags(d, "batch_norm", "bias"))
    return nn.CGConv(i, **options), "xx index" + (f" attr {width}" if width else "")


def _cheb(d, i, o):
    normalization = d.pick((None, "sym", "rw"))
    return nn.ChebConv(i, o, K=d.randint(1, 4), normalization=normalization), (
        "xx index weight?" + ("" if normalization == "sym" else " none lambda")
    )


LAYERS: dict[str, Callable] = {
    "GCNConv": _gcn,
    "SAGEConv": _sage,
    "GATConv": _gat,
    "GATv2Conv": _gatv2,
    "TransformerConv": _transformer,
    "GINEConv": _gine,
    "GENConv": _gen,
    "GeneralConv": _general,
    "RGCNConv": _rgcn,
    "EGConv": _eg,
    "PNAConv": _pna,
    "SuperGATConv": _super_gat,
    "HypergraphConv": _hypergraph,
    "RGATConv": _rgat,
    "ResGatedGraphConv": _res_gated,
    "FiLMConv": _film,
    "NNConv": _nn,
    "GMMConv": _gmm,
    "CGConv": _cg,
    "ChebConv": _cheb,
    "GINConv": lambda d, i, o: (
        nn.GINConv(_mlp(i, o), aggr=d.pick(_AGGREGATIONS[:8]), **_flags(d, "train_eps")),
        "x index",
    ),
    "GraphConv": lambda d, i, o: (
        nn.GraphConv(i, o, aggr=_aggr(d), **_flow(d), **_flags(d, "bias")),
        "x index weight?",
    ),
    "SimpleConv": lambda d, i, o: (
        nn.SimpleConv(aggr=_aggr(d), combine_root=d.pick((None, None, "sum", "cat", "self_loop"))),
        "xx index weight?",
    ),
    "MFConv": lambda d, i, o: (nn.MFConv(i, o, max_degree=d.randint(1, 5), **_flags(d, "bias")), "x index"),
    "SignedConv": lambda d, i, o: (nn.SignedConv(i, o, first_aggr=True), "xx index index2"),
    "GatedGraphConv": lambda d, i, o: (
        nn.GatedGraphConv(i + 2, num_layers=d.randint(1, 3), aggr=_aggr(d, True)),
        "xx index weight?",
    ),
    "TAGConv": lambda d, i, o: (
        nn.TAGConv(i, o, K=d.randint(0, 3), **_flags(d, "normalize", "bias")),
        "xx index weight?",
    ),
    "ARMAConv": lambda d, i, o: (
        nn.ARMAConv(i, o, d.randint(1, 3), d.randint(1, 3), act=Tanh(), **_flags(d, "shared_weights", "bias")),
        "xx index weight?",
    ),
    "SGConv": lambda d, i, o: (
        nn.SGConv(i, o, K=d.randint(1, 3), **_flags(d, "cached", "add_self_loops", "bias")),
        "xx index weight?",
    ),
    "SSGConv": lambda d, i, o: (
        nn.SSGConv(i, o, alpha=0.2, K=d.randint(1, 3), **_flags(d, "cached", "add_self_loops", "bias")),
        "xx index weight?",
    ),
    "APPNP": lambda d, i, o: (
        nn.APPNP(d.randint(1, 3), 0.2, **_dropout(d), **_flags(d, "cached", "add_self_loops")),
        "xx index weight?",
    ),
    "ClusterGCNConv": lambda d, i, o: (
        nn.ClusterGCNConv(i, o, diag_lambda=d.pick((0.0, 0.3)), **_flags(d, "add_self_loops", "bias")),
        "xx index",
    ),
    "GCN2Conv": lambda d, i, o: (
        nn.GCN2Conv(i, 0.2, d.pick((None, 0.5)), 2, **_flags(d, "shared_weights", "cached", "add_self_loops")),
        "xx xx index weight?",
    ),
    "WLConvContinuous": lambda d, i, o: (nn.WLConvContinuous(), "xx index weight?"),
    "PDNConv": lambda d, i, o: (
        nn.PDNConv(i, o, 3, 4, **_flags(d, "add_self_loops", "normalize", "bias")),
        "xx index attr 3",
    ),
    "LGConv": lambda d, i, o: (nn.LGConv(**_flags(d, "normalize")), "xx index weight?"),
    "MixHopConv": lambda d, i, o: (
        nn.MixHopConv(i, o, powers=d.sample((0, 1, 2, 3), d.randint(1, 3)), **_flags(d, "add_self_loops", "bias")),
        "xx index weight?",
    ),
    "AGNNConv": lambda d, i, o: (nn.AGNNConv(**_flags(d, "requires_grad", "add_self_loops")), "xx index"),
    "FAConv": lambda d, i, o: (
        nn.FAConv(i, 0.2, **_dropout(d), **_flags(d, "cached", "add_self_loops", "normalize")),
        "xx xx index",
    ),
    "LEConv": lambda d, i, o: (nn.LEConv(i, o, **_flags(d, "bias")), "x index weight?"),
    "FeaStConv": lambda d, i, o: (nn.FeaStConv(i, o, heads=d.randint(1, 4), **_flags(d, "add_self_loops")), "x index"),
    "EdgeConv": lambda d, i, o: (nn.EdgeConv(_mlp(2 * i, o), aggr=_aggr(d)), "x index"),
    "DynamicEdgeConv": lambda d, i, o: (
        nn.DynamicEdgeConv(_mlp(2 * i, o), k=d.randint(1, 4), aggr=_aggr(d, True)),
        "xx",
    ),
    "GravNetConv": lambda d, i, o: (nn.GravNetConv(i, o, d.randint(1, 3), 4, k=d.randint(1, 4)), "xx"),
    "PointNetConv": lambda d, i, o: (
        nn.PointNetConv(_mlp(i + 3, o), **_flags(d, "add_self_loops")),
        "xx pos index",
    ),
    "PPFConv": lambda d, i, o: (nn.PPFConv(_mlp(i + 4, o), **_flags(d, "add_self_loops")), "xx pos normal index"),
    "PointTransformerConv": lambda d, i, o: (
        nn.PointTransformerConv(i, o, **_flags(d, "add_self_loops")),
        "xx pos index",
    ),
    "PointGNNConv": lambda d, i, o: (nn.PointGNNConv(_mlp(i, 3), _mlp(i + 3, o), _mlp(o, i)), "xx pos index"),
    "HANConv": lambda d, i, o: (
        nn.HANConv(i, 4 * o, METADATA, heads=d.pick((1, 2, 4)), **_dropout(d)),
        "hetero",
    ),
    "HGTConv": lambda d, i, o: (nn.HGTConv(i, 4 * o, METADATA, heads=d.pick((1, 2, 4))), "hetero"),
    "DNAConv": lambda d, i, o: (
        nn.DNAConv(4 * i, heads=d.pick((1, 2, 4)), **_flags(d, "cached", "normalize", "add_self_loops", "bias")),
        "layers index weight?",
    ),
    "HEATConv": lambda d, i, o: (
        nn.HEATConv(i, o, 2, TYPES, 3, 4, 5, heads=d.randint(1, 3), **_flags(d, "concat", "bias")),
        "xx index nodetype type attr 4",
    ),
}
