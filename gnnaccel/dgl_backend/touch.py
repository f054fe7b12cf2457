"""DGL's inner names, each looked up once, one by one, and what of DGL is replaced by ours, with its undo.

A name that this DGL has not leaves to DGL what needs it, and nothing else: `MISSING` says what. Names of our own
modules and of DGL's are written "module:name" in the tables below. Nothing here needs the binary.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import dgl
import torch

from gnnaccel import report

MISSING: dict[str, str] = {}
"""Names that this DGL has not -> what is done without."""
NAMES: set[str] = set()
"""All that were looked for."""
_EDGES = ("number_of_etypes", "num_nodes", "num_edges", "metagraph", "formats", "adjacency_matrix_tensors")
NEEDED = dict.fromkeys(
    ("dgl.heterograph_index:HeteroGraphIndex", *(f"dgl.heterograph_index:HeteroGraphIndex.{name}" for name in _EDGES)),
    "by it a graph's edges are read",
)
"""Those of them without which there is nothing to accelerate -> why."""


def _place(path: str) -> tuple[Any, str]:
    """The holder of what stands at "module:name" or "module:class.name", and the name. AttributeError without one."""
    module, _, names = path.partition(":")
    *holders, name = names.split(".")
    try:
        holder = importlib.import_module(module)
    except ImportError as error:
        raise AttributeError(path) from error
    return functools.reduce(getattr, holders, holder), name


def _find(path: str, instead: Any = None, words: str = "") -> Any:
    """What stands at a path, or `instead`, which `words` describes; without words the patches that need it do."""
    NAMES.add(path)
    try:
        return getattr(*_place(path))
    except AttributeError:
        MISSING.setdefault(path, words)
        return instead


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return types.ModuleType(name)  # of which every name is missing


def _class(path: str) -> Any:
    """A class, or one of which there are no objects."""
    return _find(path, type(path.rpartition(".")[2], (), {}))


def lacks(*paths: str) -> str | None:
    """Words for the first of these names that is missing, or None."""
    return next((f"this DGL has no {path}" for path in paths if path in MISSING), None)


# ---- graphs: their index, and the frames of their features

for _path in NEEDED:
    _find(_path, None, "nothing is accelerated")

HeteroGraphIndex: Any = _class("dgl.heterograph_index:HeteroGraphIndex")
DGLBlock: Any = _class("dgl.heterograph:DGLBlock")
Frame: Any = _class("dgl.frame:Frame")
Column: Any = _class("dgl.frame:Column")
LazyFeature: Any = _class("dgl.frame:LazyFeature")

index_of: Callable[[Any], Any] = attrgetter("_graph")
"""The index of a DGLGraph: its structure."""
node_frames: Callable[[Any], list[Any]] = attrgetter("_node_frames")
edge_frames: Callable[[Any], list[Any]] = attrgetter("_edge_frames")
"""The frame of each type of nodes, or edges, of a DGLGraph."""
columns_of: Callable[[Any], Any] = attrgetter("_columns")
"""The columns of a frame by their names."""

_INDEX = ("dgl:DGLGraph._graph",)
_FRAMES = ("dgl:DGLGraph._node_frames", "dgl:DGLGraph._edge_frames", "dgl.frame:Frame", "dgl.frame:Frame._columns")
_READ = (*_INDEX, *_FRAMES)
_STARTS = ("_initializers", "_default_initializer")
_OF_FRAMES = tuple(f"dgl.frame:Frame.{name}" for name in _STARTS)
_COLUMN = ("storage", "scheme", "index", "device", "deferred_dtype", "data")
_OF_COLUMNS = ("dgl.frame:Column", *(f"dgl.frame:Column.{name}" for name in _COLUMN))


def frame_like(frame: Any, num_rows: int) -> Any:
    """An empty frame whose new features start as those of `frame` do."""
    made = Frame(num_rows=num_rows)
    made._initializers, made._default_initializer = frame._initializers, frame._default_initializer
    return made


def _keeps_cache() -> bool:
    """True for indices with a dictionary, as they come into the world."""
    NAMES.add(_CACHE)
    try:
        return "_cache" in vars(HeteroGraphIndex.__new__(HeteroGraphIndex))
    except Exception:
        return False


def _own_cache(index: Any) -> dict:
    return vars(index).setdefault("_gnnaccel_cache", {})


_CACHE = "dgl.heterograph_index:HeteroGraphIndex._cache"
cache_of: Callable[[Any], dict] = attrgetter("_cache") if _keeps_cache() else _own_cache
"""What is kept with an index, which DGL leaves out of pickles."""
if cache_of is _own_cache:
    MISSING[_CACHE] = "gnnaccel keeps a dictionary of its own there"

# ---- built-in functions, and the functions that DGL's own methods are made of

BinaryMessageFunction: Any = _class("dgl.function.message:BinaryMessageFunction")
CopyMessageFunction: Any = _class("dgl.function.message:CopyMessageFunction")
SimpleReduceFunction: Any = _class("dgl.function.reducer:SimpleReduceFunction")
TargetCode: Any = _class("dgl.function.base:TargetCode")
_BUILT_IN = (
    *("dgl.function.message:BinaryMessageFunction", "dgl.function.message:CopyMessageFunction"),
    *("dgl.function.reducer:SimpleReduceFunction", "dgl.function.base:TargetCode"),
)
ALL: str = _find("dgl.base:ALL", "__ALL__", "gnnaccel's own word is taken for it")
is_all: Callable[[Any], bool] = _find(
    "dgl.base:is_all", lambda arg: isinstance(arg, str) and arg == ALL, "gnnaccel asks by itself"
)
EdgeBatch: Any = _class("dgl.udf:EdgeBatch")
NodeBatch: Any = _class("dgl.udf:NodeBatch")
EDGE_IDS = "_eid"
"""The attribute of an EdgeBatch with the ids of its edges."""
core: Any = _module("dgl.core")
_CORE = ("invoke_edge_udf", "invoke_node_udf", "invoke_udf_reduce", "invoke_gspmm", "invoke_gsddmm", "is_builtin")
_CALLS = tuple(f"dgl.core:{name}" for name in _CORE)
reshape_lhs_rhs: Any = _find("dgl.ops.spmm:reshape_lhs_rhs")
pad_tuple: Any = _find("dgl.heterograph:pad_tuple")
reduce_dict_data: Any = _find("dgl.heterograph:reduce_dict_data")
_PNA = ("scale_amplification", "scale_attenuation")
DEGREE_SCALES: frozenset = frozenset(
    _find(f"dgl.nn.pytorch.conv.pnaconv:{name}", None, "it is looked through as a user's function is") for name in _PNA
)
"""PNAConv's functions that take the logarithm of a degree by NumPy, which cannot be looked through: read by hand."""

# ---- layers

ALLOWS = "_allow_zero_in_degree"
"""The attribute of layers that refuse nodes without in-edges unless it is true."""
allows_zero_in_degree: Callable[[Any], bool] = attrgetter(ALLOWS)
in_features: Callable[[Any], int] = attrgetter("_in_feats")
out_features: Callable[[Any], int] = attrgetter("_out_feats")
heads_and_width: Callable[[Any], tuple[int, int]] = attrgetter("_num_heads", "_out_feats")
sage_widths: Callable[[Any], tuple[int, int]] = attrgetter("_in_src_feats", "_out_feats")
"""Features of the sources of a SAGEConv, and of what it gives."""
sage_kind: Callable[[Any], str] = attrgetter("_aggre_type")
gin_kind: Callable[[Any], str] = attrgetter("_aggregator_type")
conv_norm: Callable[[Any], str] = attrgetter("_norm")
conv_activation: Callable[[Any], Any] = attrgetter("_activation")
steps: Callable[[Any], int] = attrgetter("_n_steps")

_ATTENDS = ("_num_heads", "_out_feats", "feat_drop", "attn_drop", "leaky_relu", "res_fc", "activation", ALLOWS)
# Layer -> arguments to make one of, and the attributes that are read of it.
_LAYERS: dict[str, tuple[tuple, tuple[str, ...]]] = {
    "AGNNConv": ((), ("beta", ALLOWS)),
    "DotGatConv": ((1, 1, 1), ("_num_heads", "_out_feats", ALLOWS)),
    "EdgeGATConv": ((1, 1, 1, 1), (*_ATTENDS, "attn_l", "attn_r", "bias", "fc_edge", "attn_edge")),
    "GatedGraphConv": ((1, 1, 1, 1), ("_out_feats", "_n_steps", "linears", "gru")),
    "GATConv": ((1, 1, 1), (*_ATTENDS, "attn_l", "attn_r", "bias", "has_explicit_bias")),
    "GATv2Conv": ((1, 1, 1), (*_ATTENDS, "attn", "fc_src", "fc_dst", "share_weights")),
    "GINConv": ((), ("_aggregator_type", "eps", "apply_func", "activation")),
    "GraphConv": ((1, 1), ("_in_feats", "_out_feats", "_norm", "_activation", "weight", "bias", ALLOWS)),
    "HGTConv": ((1, 1, 1, 1, 1), ("linear_k", "relation_pri", "relation_att", "relation_msg", "skip")),
    "RelGraphConv": ((1, 1, 1), ("linear_r", "bias", "self_loop", "layer_norm", "dropout")),
    "SAGEConv": ((1, 1, "mean"), ("_aggre_type", "_in_src_feats", "_out_feats", "fc_self", "fc_neigh", "feat_drop")),
    "TypedLinear": ((1, 1, 1), ("W", "regularizer", "num_types")),
}


def _attributes(layer: str) -> tuple[str, ...]:
    return tuple(f"dgl.nn.pytorch:{layer}.{name}" for name in _LAYERS[layer][1])


def unknown_layer(layer: str) -> str | None:
    """Words for a layer class of which something is missing that we read; None for one that is as we know it."""
    look()
    return lacks(f"dgl.nn.pytorch:{layer}.forward", *_attributes(layer))


_aggregate: Any = _find("dgl.nn.pytorch.hetero:get_aggregate_fn", lambda kind: None)
SUM_OF_TYPES, MEAN_OF_TYPES = _aggregate("sum"), _aggregate("mean")
"""What HeteroGraphConv reduces the results of its layers by."""
_HETERO = "dgl.nn.pytorch:HeteroGraphConv"
_find(f"{_HETERO}._get_module")


def layer_of(conv: Any, etype: tuple) -> Any:
    """The layer of an edge type of a HeteroGraphConv."""
    return conv._get_module(etype)


# ---- samplers

utils: Any = _module("dgl.utils")
_FUSED = "dgl.sampling.neighbor:sample_neighbors_fused"
_UTILS = ("extract_edge_subframes", "extract_node_subframes", "extract_node_subframes_for_block", "set_new_frames")
_SAMPLED = (*_INDEX, "dgl.heterograph:DGLBlock", *(f"dgl.utils:{name}" for name in _UTILS), "dgl.utils:prepare_tensor")
set_edge_lazy_features: Any = _find("dgl.dataloading.base:set_edge_lazy_features")
set_node_lazy_features: Any = _find("dgl.dataloading.base:set_node_lazy_features")
_LATER = ("dgl.dataloading.base:set_edge_lazy_features", "dgl.dataloading.base:set_node_lazy_features")

# ---- DGL's C++

Function: Any = _class("dgl._ffi.function:Function")
ObjectBase: Any = _class("dgl._ffi.object:ObjectBase")
NDArray: Any = _class("dgl.ndarray:NDArray")
_global_function = _find("dgl._ffi.function:get_global_func")
_CALLED = "dgl.heterograph_index:_CAPI_DGLHetero"
_BLOCK = (
    *("dgl.heterograph_index:HeteroGraphIndex", f"{_CALLED}CreateHeteroGraphWithNumNodes"),
    *("dgl.heterograph_index:create_unitgraph_from_csr", "dgl.graph_index:from_coo", "dgl.backend:to_dgl_nd"),
    "dgl._ffi.object:ObjectBase.__init_handle_by_constructor__",
)
_BRIDGE = (
    *("dgl._ffi.function:Function", "dgl._ffi.object:ObjectBase", "dgl.ndarray:NDArray", *_BLOCK),
    *(f"{_CALLED}GetAllowedFormats", f"{_CALLED}GetFormatGraph", f"{_CALLED}GetMetaGraph"),
    *("dgl._ffi.function:get_global_func", "dgl.utils:to_dgl_context"),
)
METAGRAPH = "_CAPI_DGLHeteroGetMetaGraph"
"""The function of C++ that gives the graph of types."""


def _now(path: str) -> Callable[[], Any]:
    """What stands there when it is asked for: the bridge replaces it."""
    _find(path)
    try:
        return functools.partial(getattr, *_place(path))
    except AttributeError:
        return lambda: None


allowed_formats = _now(f"{_CALLED}GetAllowedFormats")
with_formats = _now(f"{_CALLED}GetFormatGraph")
create_index = _now(f"{_CALLED}CreateHeteroGraphWithNumNodes")
create_unit = _now("dgl.heterograph_index:create_unitgraph_from_csr")
create_metagraph = _now("dgl.graph_index:from_coo")
to_array = _now("dgl.backend:to_dgl_nd")


def has_cuda() -> bool:
    """True for a DGL that was built with CUDA, and where that cannot be told."""
    return _global_function is None or _global_function("device_api.cuda", allow_missing=True) is not None


def no_block_index() -> str | None:
    """Why no index of DGL's can be made of a structure that is on a GPU; None if it can."""
    return lacks(*_BLOCK)


def globals_of_dgl() -> Iterator[tuple[types.ModuleType, str, Any]]:
    """(module, name, value) of all that DGL's modules hold now."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "dgl" and module is not None:
            for key, value in list(vars(module).items()):
                yield module, key, value


# ---- what is replaced


class Patch(NamedTuple):
    """Something of ours in the place of something of DGL's.

    ours : of what stands at the first of `paths` a function of this package makes what is to stand at all of them.
        Without paths it gives (holder, name, value) of many. None: DGL's own stays, counted.
    needs : names without which DGL's own stays.
    kind : under which calls are counted that then are DGL's.
    when : "bridge": all of these or none; "kernels": with our kernels alone; "no messages": DGL passes messages.
    why : reason of calls that are DGL's, where nothing is missing.
    """

    ours: str | None
    paths: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    kind: str = ""
    when: str = ""
    why: str = ""


def _layer(ours: str, layer: str, *needs: str) -> Patch:
    path = f"dgl.nn.pytorch:{layer}.forward"
    return Patch(ours, (path,), (*_attributes(layer), *needs), f"dgl.{layer}", "kernels")


_SPARSE, _TENSOR = "dgl.backend.pytorch.sparse:", "dgl.backend.pytorch.tensor:"
_FPS = tuple(f"dgl.geometry.{module}:_farthest_point_sampler" for module in ("capi", "fps"))
_KEPT = "dgl.heterograph_index:HeteroGraphIndex.get_relation_graph"  # whose results are kept, and what they have
_MESSAGES = "dgl.core:message_passing"
_IN_FRAMES = (*_READ, *_BUILT_IN, "dgl.frame:Column")
_USERS = (
    *(*_CALLS, *_READ, *_OF_FRAMES, *_OF_COLUMNS, *_BUILT_IN, "dgl.frame:LazyFeature"),
    *("dgl.udf:EdgeBatch", "dgl.udf:NodeBatch", f"dgl.udf:EdgeBatch.{EDGE_IDS}"),
)


def _bridged(ours: str, *paths: str) -> Patch:
    return Patch(ours, paths, _BRIDGE, "", "bridge")


def _of_index(ours: str, name: str) -> Patch:
    return _bridged(f"bridge:{ours}", f"dgl.heterograph_index:HeteroGraphIndex.{name}")


PATCHES: tuple[Patch, ...] = (
    _bridged("bridge:carriers"),
    *(
        _bridged(f"bridge:{ours}", f"{_TENSOR}{name}", f"dgl.backend:{name}")
        for ours, name in (
            ("to_array", "zerocopy_to_dgl_ndarray"),
            ("to_array_for_write", "zerocopy_to_dgl_ndarray_for_write"),
            ("from_array", "zerocopy_from_dgl_ndarray"),
            ("to_capsule", "zerocopy_to_dlpack"),
        )
    ),
    *(_bridged(f"bridge:{name}", f"{_SPARSE}{name}", f"dgl.backend:{name}") for name in ("segment_mm", "gather_mm")),
    _bridged("bridge:of_gpus"),
    _bridged("bridge:init_by_constructor", "dgl._ffi.object:ObjectBase.__init_handle_by_constructor__"),
    _bridged("bridge:farthest_points", *_FPS),
    _bridged("bridge:context", "dgl._ffi.ndarray:NDArrayBase.ctx"),
    _of_index("copy_to", "copy_to"),
    _of_index("record_stream", "record_stream"),
    _of_index("context", "ctx"),
    _of_index("edges", "edges"),
    _of_index("pinned_copy", "pin_memory"),
    _of_index("pin", "pin_memory_"),
    _of_index("unpin", "unpin_memory_"),
    _of_index("is_pinned", "is_pinned"),
    *(Patch(f"ops:{name}", (_SPARSE + name,)) for name in ("GSpMM", "GSDDMM", "EdgeSoftmax", "SegmentReduce")),
    *(Patch(f"hetero:{name}", (_SPARSE + name,)) for name in ("GSpMM_hetero", "GSDDMM_hetero", "EdgeSoftmax_hetero")),
    Patch("ops:mean_gspmm", ("dgl.ops:gspmm", "dgl.ops.spmm:gspmm"), (*_INDEX, "dgl.ops.spmm:reshape_lhs_rhs")),
    Patch("short:edge_softmax", ("dgl.ops.edge_softmax:edge_softmax_internal",)),
    Patch("nn:checks_of_degrees", needs=_INDEX),
    *(
        _layer(ours, layer, *_INDEX)
        for layer, ours in {
            "AGNNConv": "nn:agnn_forward",
            "DotGatConv": "nn:dotgat_forward",
            "EdgeGATConv": "nn:edge_gat_forward",
            "GatedGraphConv": "relational:gated_graph_forward",
            "GATConv": "nn:gat_forward",
            "GATv2Conv": "nn:gatv2_forward",
            "GINConv": "convolutions:gin_forward",
            "GraphConv": "convolutions:conv_forward",
            "HGTConv": "relational:hgt_forward",
            "RelGraphConv": "relational:rel_graph_forward",
            "SAGEConv": "convolutions:sage_forward",
        }.items()
    ),
    _layer("typed:typed_linear_forward", "TypedLinear"),
    *(
        Patch(f"typed:{name}", tuple(f"{module}:{name}" for module in modules), when="kernels")
        for name, modules in (
            ("segment_mm", ("dgl.ops", "dgl.ops.segment", "dgl.nn.pytorch.linear")),
            ("gather_mm", ("dgl.ops", "dgl.ops.gather_mm", "dgl.nn.pytorch.linear")),
        )
    ),
    Patch("ops:of_dense", ("dgl.backend:zerocopy_to_dgl_ndarray",)),
    Patch("ops:of_dense", ("dgl.backend:zerocopy_to_dlpack",)),
    Patch("structure:relation_graph", (_KEPT,)),
    Patch("structure:reversed_index", ("dgl.heterograph_index:HeteroGraphIndex.reverse",)),
    Patch("structure:in_degrees", ("dgl:DGLGraph.in_degrees",), _INDEX),
    Patch("structure:out_degrees", ("dgl:DGLGraph.out_degrees",), _INDEX),
    Patch("short:update_all", ("dgl:DGLGraph.update_all",), _IN_FRAMES),
    Patch("short:apply_edges", ("dgl:DGLGraph.apply_edges",), _IN_FRAMES),
    Patch(
        "stacked:multi_update_all",
        ("dgl:DGLGraph.multi_update_all",),
        (
            *_IN_FRAMES,
            "dgl.heterograph:pad_tuple",
            "dgl.heterograph:reduce_dict_data",
            _MESSAGES,
            "dgl.core:is_builtin",
            _KEPT,
        ),
        when="kernels",
    ),
    Patch(
        "hetero_conv:forward",
        (f"{_HETERO}.forward",),
        (*_INDEX, "dgl.nn.pytorch.hetero:get_aggregate_fn", f"{_HETERO}._get_module", _KEPT),
        "dgl.HeteroGraphConv",
        "kernels",
    ),
    Patch(
        "samplers:sample_blocks", ("dgl.dataloading:NeighborSampler.sample_blocks",), _SAMPLED, "dgl.NeighborSampler"
    ),
    Patch(
        None,
        ("dgl.dataloading:LaborSampler.sample_blocks",),
        kind="dgl.LaborSampler",
        why="DGL's own library samples",
    ),
    Patch(
        "subgraphs:shadow_sample",
        ("dgl.dataloading:ShaDowKHopSampler.sample",),
        (*_SAMPLED, *_LATER),
        "dgl.ShaDowKHopSampler",
    ),
    Patch("subgraphs:saint_sample", ("dgl.dataloading:SAINTSampler.sample",), (*_SAMPLED, *_LATER), "dgl.SAINTSampler"),
    Patch("subgraphs:node_subgraph", ("dgl:node_subgraph", "dgl.subgraph:node_subgraph"), _SAMPLED),
    Patch("subgraphs:node_subgraph", ("dgl:DGLGraph.subgraph",), _SAMPLED),  # which has its own help()
    Patch("messages:message_passing", (_MESSAGES,), _USERS, when="kernels"),
    Patch(
        "messages:edge_function",
        ("dgl.core:invoke_edge_udf",),
        _USERS,
        "dgl.message function",
        "kernels",
        "a user-defined message function runs as DGL runs it",
    ),
    Patch(
        None,
        ("dgl.core:invoke_udf_reduce",),
        kind="dgl.reduce function",
        when="no messages",
        why="a user-defined reduce function runs as DGL runs it",
    ),
)
"""In order: later ones find what earlier ones have put there."""

_undo: list[tuple[Any, str, Any]] = []  # (holder, attribute, what was there), in order of replacement
_PARTS = {
    "bridge": "CUDA graphs of a DGL that was built for the CPU",
    "hetero": "message passing of several edge types",
    "samplers": "NeighborSampler",
    "messages": "user-defined functions",
}
"""What patches of these modules are about; others are named by what they replace."""
_INHERITED = object()  # in place of what was there: the holder had it from a base class


def is_patched() -> bool:
    """True between `patch` and `undo`."""
    return bool(_undo)


def patch(with_bridge: bool, our_kernels: bool) -> None:
    """Replace what `PATCHES` lists, and say once what this DGL has not.

    ImportError, in words, for a DGL without which there is nothing to accelerate.
    """
    look()
    for path, why in NEEDED.items():
        if path in MISSING:
            raise ImportError(f"DGL {dgl.__version__} has no {path}, and {why}")
    patches = [one for one in PATCHES if one.when != "bridge" or with_bridge]
    for one in patches:
        for path in one.paths:
            _find(path)  # a module that DGL has not imported is now
    has_bridge = not any(lacks(*one.paths, *one.needs) for one in patches if one.when == "bridge")
    done: set[str] = set()
    for one in patches:
        if (one.when == "bridge" and not has_bridge) or (one.when == "no messages" and _MESSAGES in done):
            continue
        why = lacks(*one.paths[:1], *one.needs) or ""
        ours = one.ours if our_kernels or one.when != "kernels" else None
        if ours is not None and not why:
            try:
                _put(ours, one.paths)
                done.update(one.paths)
                continue
            except Exception as error:  # of a version that has all names, and something else behind one
                if one.when == "bridge":
                    raise
                why = f"{type(error).__name__}: {error}"
                MISSING[one.paths[0] if one.paths else one.ours or ""] = f"is not replaced, {why}"
        if one.kind and (why or one.why) and _is_there(one.paths[0]):
            holder, name = _place(one.paths[0])
            _replace(holder, name, _counted(getattr(holder, name), one.kind, why or one.why))
    _say()


def _put(ours: str, paths: tuple[str, ...]) -> None:
    module, maker = ours.split(":")
    make = getattr(importlib.import_module(f"{__package__}.{module}"), maker)
    if not paths:
        for holder, name, value in make():
            _replace(holder, name, value)
        return
    value = make(getattr(*_place(paths[0])))
    for path in paths:
        if path not in MISSING:
            _replace(*_place(path), value)


def _replace(holder: Any, name: str, value: Any) -> None:
    found = vars(holder).get(name, _INHERITED)
    _undo.append((holder, name, found))
    if isinstance(found, types.FunctionType) and isinstance(value, types.FunctionType):
        functools.update_wrapper(value, found, updated=())  # errors of a call, and help(), name DGL's function
    setattr(holder, name, value)


def _counted(original: Callable, kind: str, why: str) -> Callable:
    """DGL's own, counted."""

    def call(*args, **kwargs):
        report.fallback(kind, why)
        return original(*args, **kwargs)

    return call


def undo() -> None:
    """Put back everything that `patch` replaced."""
    while _undo:
        holder, name, value = _undo.pop()
        if value is _INHERITED:
            delattr(holder, name)
        else:
            setattr(holder, name, value)


# ---- what objects of DGL have, and what is said


@functools.cache
def look() -> None:
    """Look at an object of each kind for the attributes that we read, and for all names that patches need."""
    kinds: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
        ("dgl:DGLGraph", lambda: dgl.graph(([0], [0])), ("_graph", "_node_frames", "_edge_frames")),
        ("dgl.frame:Frame", lambda: Frame(num_rows=1), ("_columns", *_STARTS)),
        ("dgl.frame:Column", lambda: Column(torch.zeros(1)), _COLUMN),
        ("dgl.udf:EdgeBatch", lambda: EdgeBatch(None, None, None, {}, {}, {}), (EDGE_IDS,)),
    ]
    for layer, (args, names) in _LAYERS.items():
        kinds.append((f"dgl.nn.pytorch:{layer}", functools.partial(_made, layer, args), names))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for path, make, names in kinds:
            NAMES.update(f"{path}.{name}" for name in names)
            if _is_there(path):
                try:
                    one = make()
                except Exception:  # it is made otherwise: nothing is known
                    one = None
                MISSING.update({f"{path}.{name}": "" for name in names if not hasattr(one, name)})
    for one in PATCHES:
        for path in set(one.needs) - NAMES if one.when != "bridge" else ():
            _find(path)


def _is_there(path: str) -> bool:
    try:
        return hasattr(*_place(path))
    except AttributeError:
        return False


def _made(layer: str, args: tuple) -> Any:
    return getattr(*_place(f"dgl.nn.pytorch:{layer}"))(*args)


def _without(path: str) -> str:
    """What is DGL's own without a name."""
    without = [_part(one) for one in PATCHES if path in (*one.paths, *one.needs)]
    return f"left to DGL: {', '.join(dict.fromkeys(without)) or 'nothing'}"


def _part(one: Patch) -> str:
    """What a patch is about."""
    said = _PARTS.get((one.ours or "").split(":")[0], "")
    return said or (one.paths[0].split(":")[1].removesuffix(".forward") if one.paths else "checks of degrees")


@functools.cache
def _say() -> None:
    log = logging.getLogger("gnnaccel")
    for path, words in MISSING.items():
        MISSING[path] = words or _without(path)
        log.warning("gnnaccel: DGL %s has no %s: %s", dgl.__version__, path, MISSING[path])


def guard_sampling() -> None:
    """Keep DGL 2.1.0's fused neighbour sampling away from int32 graphs, for which it returns wrong blocks.

    With several OpenMP threads most of its int32 blocks have source ids beyond the sources, and it can abort the
    process. The unfused path gives the same kind of block and is right. It is part of making DGL usable, so it stays.
    """
    fused = _find(_FUSED, None, "there is nothing to guard")
    if fused is None or getattr(fused, "_gnnaccel_guard", False):
        return
    neighbor = _module("dgl.sampling.neighbor")

    def sample_neighbors_fused(g, nodes, fanout, *args, **kwargs):
        if g.idtype != torch.int32:
            return fused(g, nodes, fanout, *args, **kwargs)
        kwargs.pop("mapping", None)
        frontier = neighbor.sample_neighbors(g, nodes, fanout, *args, **kwargs)
        block = dgl.to_block(frontier, nodes)
        if dgl.EID in frontier.edata:
            block.edata[dgl.EID] = frontier.edata[dgl.EID]
        return block

    sample_neighbors_fused.__doc__ = fused.__doc__
    sample_neighbors_fused._gnnaccel_guard = True  # type: ignore[attr-defined]
    for holder in (neighbor, dgl.sampling, dgl.DGLGraph):
        holder.sample_neighbors_fused = sample_neighbors_fused
