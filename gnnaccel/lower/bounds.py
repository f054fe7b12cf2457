"""Every number that decides which way a call, a graph or a model goes, with its unit and where it came from.

Each is a plain value, read as `bounds.NAME` where it is used, so that a test sets it in one place; a few are
read once, as defaults. Values by device are dicts. `rows()` lists them; docs/bounds.md is written from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

# Where a number came from, if not from tables in benchmarks/results.
MEASURED = "measured, table not kept"
REASONED = "reasoned: no measurement on record"
BUILT = "what kernels, files or a GPU can take"

INT32_MAX = 2**31 - 1


class Row(NamedTuple):
    """A number: measured on, or meant for, `device`; `table` names files of benchmarks/results, or an origin."""

    section: str
    name: str
    value: object
    unit: str
    device: str
    table: str
    decides: str


def bound(value: T, unit: str, device: str, table: str, decides: str) -> T:
    """The value itself: the rest is for who reads this file, and for `rows`."""
    return value


def rows() -> list[Row]:
    """All numbers of this file as it is written, by the sections that its comments begin."""
    found = []
    for text in Path(__file__).read_text("utf-8").split("\n# ---- ")[1:]:
        section, _, code = text.partition("\n")
        given: dict[str, tuple] = {}
        exec(code, {**globals(), "bound": lambda *row: row}, given)
        found += [Row(section, name, *row) for name, row in given.items()]
    return found


# ---- Messages

# Making them again in blocks pays on the CPU as soon as they leave the cache. On an H200 it takes twice the time, so
# there it is for messages that would not fit beside the rest.
STORED_BYTES = bound(
    {"cpu": 4 << 20, "cuda": 4 << 30},
    "bytes",
    "CPU, H200",
    MEASURED,
    "up to this messages are made at once, not in blocks",
)
# On the CPU an equivariant layer of 50 thousand edges takes 0.79 of PyG's speed in blocks, 1.91 stored; a softmax for
# each of 64 features 0.87 and 1.89; GATv2's scores, which no map is part of, 1.44 and 1.16.
STORED_COSTLY_BYTES = bound(
    {"cpu": 256 << 20, "cuda": 4 << 30},
    "bytes",
    "EPYC",
    MEASURED,
    "up to this messages of linear maps, and scores of a softmax, are made at once, as to make them again takes long",
)
# On the CPU a few blocks stay in a core's share of the cache; on a GPU one fills the device.
BLOCK_BYTES = bound({"cpu": 4 << 20, "cuda": 256 << 20}, "bytes", "CPU, CUDA", REASONED, "size of a block of messages")
# CPU: GEN, FiLM and LE take 1.0 to 1.5 times PyG's time at 128,000, 0.9 to 1.1 times at 256,000. CUDA: GEN and LE
# take as long at some 8 million, others at two to three times as many.
FEW_MESSAGES = bound(
    {"cpu": 1 << 18, "cuda": 8 << 20}, "numbers", "CPU, H100", MEASURED, "up to this the framework makes the messages"
)
# Of short rows there is little to reduce. Batches of molecules, two edges to an atom: GEN 0.8 of PyG's speed at
# 180,000 numbers, 0.95 at 370,000, 1.0 at 750,000.
SHORT_ROWS = bound(4, "edges to a node", "CPU", MEASURED, "up to this FEW_MESSAGES is twice as large on the CPU")
# How many numbers of FEW_MESSAGES one number counts. CPU: benchmarks/every_layer.py on 300 to 5,800 edges. CUDA: what
# lazy features take of Python's time, some 1.5 ms a step, against messages that PyG stores, of the layers in
# every_layer.py (--all-ours) on 300 to 800,000 edges: most cross between 200,000 and 400,000 edges of 64 features,
# some at half.
COUNTS_PROPAGATED = bound(
    {"cpu": 4, "cuda": 0.5}, "for one", "EPYC, H100", MEASURED, "what a number of a message counts in FEW_MESSAGES"
)
COUNTS_UPDATED = bound({"cpu": 8, "cuda": 0.5}, "for one", "EPYC, H100", MEASURED, "the same where edges are updated")
# CPU: benchmarks/user_layers.py --layers "no MessagePassing,plain attention" of 64 features: at 3,000 edges 1.26 times
# torch's time, at 20,000 edges 0.77 and 0.53. CUDA: as COUNTS_PROPAGATED.
COUNTS_PLAIN = bound(
    {"cpu": 0.5, "cuda": 0.5}, "for one", "EPYC", MEASURED, "the same of code that gathers and scatters with torch"
)
COUNTS_STORED = bound(
    {"cpu": 1, "cuda": 0.5}, "for one", "EPYC, H100", MEASURED, "the same of messages that are no products"
)
COUNTS_STORED_TWICE = bound(
    {"cpu": 1, "cuda": 1}, "for one", "EPYC, H100", MEASURED, "the same in FeaStConv, FiLMConv, GENConv and LEConv"
)
COUNTS_HEAT = bound({"cpu": 4, "cuda": 0.5}, "for one", "EPYC, H100", MEASURED, "the same of a feature in HEATConv")
COUNTS_HGT = bound({"cpu": 16}, "for one", "EPYC", MEASURED, "the same of a feature in HGTConv, not timed on CUDA")
COUNTS_MATRIX_ON_CUDA = bound(
    0.25, "for one", "H100", MEASURED, "the same of a number of an edge's matrix; 1 on the CPU"
)
COUNTS_GEN = bound(4, "times", "H100", MEASURED, "what GENConv's messages count more on its short way")
COUNTS_GATES = bound(8, "times", "CPU", MEASURED, "what ResGatedGraphConv's count more: our gates take less of the CPU")
COUNTS_UNGRADED = bound(16, "times", "CPU", MEASURED, "what GINEConv's count more on the CPU if no edge has a gradient")
# They would have to be sorted, for one use perhaps.
FEW_AT_FIRST = bound(
    {"cuda": 8 << 20}, "numbers", "CUDA", REASONED, "up to this a layer's first call on new edges is PyG's own"
)
WIDENED_AT_FIRST = bound(8, "times", "any", REASONED, "so much wider a layer may map features in such a call")
LONGEST_SCATTERED = bound(
    1 << 15, "edges", "any", REASONED, "up to this a sum in the order of edges keeps the digits of float32"
)
STORED_FEATURES = bound(
    16, "features", "any", REASONED, "up to this features of edges are stored: attention heads, coordinates"
)
MULTIPLIED_FEATURES = bound(
    {"cpu": 1 << 30, "cuda": 16},
    "features",
    "H200",
    MEASURED,
    "a product of sources with rows of edges of more features is a generated walk, not an SpMM: 0.15 for 0.32 ms",
)
WAITS_WITH_ROWS = bound(
    {"cpu": 17, "cuda": 0},
    "features",
    "any",
    MEASURED,
    "few features of edges wait for the walk that reads them, so that scores, softmax and sum are one walk, where they "
    "are made of rows of edges that are as wide",
)
TRUSTED_ITEMS = bound(64, "things", "any", REASONED, "larger collections are not looked through when code is read")
DROPPED_IN_VAIN = bound(3, "batches", "CUDA", REASONED, "after so many begun in vain no batch of a loader is begun")

# ---- Compiled

FEW_COMPILED = bound(
    1 << 22, "edges times features", "H100", MEASURED, "up to this Inductor makes sums in programs of CUDA graphs"
)
PACKED_EDGES = bound(
    1 << 19, "edges", "CUDA", REASONED, "up to this a graph is copied at each call; larger ones have lists of work"
)
REMADE_BYTES = bound(1 << 24, "bytes", "CUDA", REASONED, "from this on GATv2's projections are made again, not kept")

# ---- Sums

READY_SUMS = bound(32, "kinds of sums", "any", REASONED, "so many a graph keeps ready, then all are dropped")
SMALL_GRAPH = bound(
    {"cpu": 1 << 14, "cuda": 1 << 20}, "edges", "CPU, CUDA", REASONED, "up to this a graph may be one that is used once"
)
# A sampled block passes through a few layers, forward and backward, and is gone.
KEPT_CALLS = bound(8, "kinds of calls", "any", REASONED, "so many a layer keeps, to make them again without its code")
NEW_GRAPH_USES = bound(8, "uses", "any", REASONED, "before so many a graph may be a sampled one, gone after its step")
# Two cores; 16 lose on graphs whose edges lie in order.
SOURCES_MATTER = bound(
    32, "features for one of an edge", "CPU", MEASURED, "from this on rows are ordered by their sources"
)
# Looked up 1.07 to 1.2 times the time at mean degrees of 50 to 600, 0.5 to 1.0 at 2 to 32.
SCALE_FIRST_DEGREE = bound(
    40, "edges of a source", "H200", MEASURED, "above this sources are scaled before a sum, not looked up for each edge"
)
BIAS_BYTES = bound(
    1 << 22, "bytes", "H100", "finished_sums_h100.csv", "from this on our kernels take a bias' gradient and rounding"
)
OWN_DEGREE = bound(
    64, "edges of a row", "H100", "finished_sums_h100.csv", "up to this the sum's kernel adds a row's own source"
)
EDGE_ORDER_SLICE = bound(
    256, "bytes", "H200", "edge_order_h200.csv", "more are read in slices, and values of edges for each of them"
)
# With fewer the values stay in L2, and the pass is one more launch.
EDGE_ORDER_EDGES = bound(
    1_000_000, "edges", "H200", "edge_order_h200.csv", "from this on values that slices read again are moved first"
)
EDGE_ORDER_MANY = bound(
    4_000_000, "edges", "H200", "edge_order_h200.csv", "from this on values that are read once are too"
)
EDGE_ORDER_BYTES = bound(
    32, "bytes of an edge", "CUDA", REASONED, "up to this they are moved: one sector, of which nothing is wasted"
)
EDGE_ORDER_DEGREE = bound(
    128, "edges of a row", "H200", "edge_order_h200.csv", "from this on the edges of a row lie far apart"
)
NARROW_DOTS = bound(4, "features", "CUDA", BUILT, "up to this cuda/sddmm_narrow.cu serves")
NARROW_SUMS = bound(
    4, "features", "CUDA", BUILT, "up to this cuda/spmm_narrow.cu serves, which looks each weight up once"
)
NARROW_SUM_BYTES = bound(
    128,
    "bytes of a row",
    "H200",
    "edge_order_h200.csv",
    "up to this a row's reading does not hide its weight's look-up",
)
PADDED_BYTES = bound(
    16 << 20, "bytes", "H200", "padding_h200.csv", "from this on odd widths are padded for inner products"
)
PADDED_READS = bound(
    32, "edges for a row", "H200", "padding_h200.csv", "from this on they are: copies are a small part then"
)
MAPPED_SUM_ROWS = bound(1 << 12, "rows", "CPU", REASONED, "size of a block of sums that are mapped")
SAMPLED_PRODUCTS = bound(
    1 << 23, "multiplications", "any", REASONED, "from this on rows that no seed needs are left out of a map"
)
GRADIENT_NODES = bound(
    4096, "nodes of autograd", "any", REASONED, "more are not looked through for rows without a gradient"
)
NARROW_PLACES = bound(1 << 8, "features", "any", BUILT, "up to this the places of kept entries are of one byte")
WIDEST_PLACES = bound(1 << 16, "features", "any", BUILT, "up to this rows may keep k entries")
MAXK_FEATURES = bound(
    4096, "features", "CUDA", BUILT, "up to this a row fits into shared memory; half as many in float64"
)
# Yeast-like (2.1 edges a row), k = 16, 32, 64: 0.50, 0.65 and 0.73 ms, by destination 0.77, 0.86 and 0.96. From 13 on
# by destination is the faster one.
BY_SOURCE_DEGREE = bound(4, "edges of a row", "H200", "cuda_maxk_h200.csv", "up to this MaxK's gradient goes by source")
KEPT_SHARE = bound(
    {"cuda": 0.5, "cpu": 0.25},
    "of a row",
    "H200, EPYC",
    "cuda_maxk_h200.csv, cpu_maxk_epyc.csv",
    "up to this MaxK is faster",
)

# ---- Attention

DOT_HEAD_BYTES = bound(1024, "bytes of a head", "CUDA", BUILT, "up to this attention is one op: its lanes hold a head")
# The gradient of the queries is then a weighted sum, and not another pass that computes them again.
SCORES_KEPT = bound(
    4, "tensors like the result", "CUDA", REASONED, "up to this the backward pass writes the scores' gradients down"
)
# Rows so short that a wide head's sum is most of the work, and has a faster kernel: yeast-like, of degree 2, takes
# 0.6 of the time at 1x128 and 4x64, 1.0 at 1x32, 1.3 at 4x16.
BY_PARTS_EDGES = bound(
    1_000_000, "edges", "H200", MEASURED, "from this on attention is three ops where the two next hold"
)
BY_PARTS_DEGREE = bound(8, "edges of a row", "H200", MEASURED, "below this in the mean it is")
BY_PARTS_BYTES = bound(256, "bytes of a head", "H200", MEASURED, "from this on it is")
HEAD_DOTS_VECTORS = bound(2, "vectors", "CUDA", BUILT, "up to this inner products by head are one kernel")
SOFTMAX_ROWS = bound(4096, "rows of a segment", "CUDA", BUILT, "up to this a block of 8 warps takes a segment")

# ---- Products

# H100, microseconds, torch's for ours: 169,343 x 64 to 256 columns 192 for 128, its gradients 148 for 116 and 296 for
# 130; 20,000 rows 29 for 22, 26 for 27 and 55 for 35; 2,708 to 128 columns 6 for 7, 6 for 10 and 18 for 24.
PRODUCT_ROWS = bound(1 << 14, "rows", "H100", "products_h100.csv", "from this on products of float32 are our kernels'")
PRODUCT_ROWS_BACK = bound(1 << 15, "rows", "H100", "products_h100.csv", "from this on gradients to features are")
PRODUCT_WIDTH = bound(512, "columns", "H100", "products_h100.csv", "up to this they are")
# Tiles so few that the rows are read once or twice: 256 x 256 takes 1.3 of torch's time.
PRODUCT_WEIGHT = bound(1 << 14, "numbers", "H100", "products_h100.csv", "up to this a weight's gradient is")
PRODUCT_CAPABILITY = bound((8, 0), "compute capability", "CUDA", BUILT, "from this on: cp.async and TF32")
# Both passes take 0.36 to 0.49 of torch's time with AVX-512 on an EPYC of Zen 5, and 0.60 to 0.87 with AVX2: 32 to
# 600 columns, 300 to 50,000 rows, the fewer the better. Without either, twice torch's time; and on an Intel with
# AVX-512 up to 1.9 of it, of 300 rows.
NORMED_WIDTH = bound(1024, "columns", "EPYC", MEASURED, "up to this two maps with a norm between them are one op")
# Below these Python's part of ours is more than is spared.
NORMED_NUMBERS = bound(
    (1 << 13, 5 << 10), "numbers between the maps", "EPYC", MEASURED, "from this on they are: without a norm, with one"
)
MAPS_TOGETHER_ROWS = bound(512, "rows", "CPU", REASONED, "from this on two maps are one op on the CPU")
FEW_TYPED_BIASES = bound(1 << 14, "numbers", "EPYC", MEASURED, "up to this torch gathers the biases of types")
# With so many multiplications to a segment the kernel takes as much longer for them than torch's product as that
# product's call takes: 12 us, at 0.03 to 0.05 ps a multiplication on tensor cores. Without them 0.012, and none up to
# 64 x 64.
SEGMENT_CALL = bound(
    360_000_000,
    "multiplications",
    "H200",
    "segment_matmul_h200.csv",
    "up to this one launch takes all, on tensor cores",
)
SEGMENT_CALL_FULL = bound(
    1_000_000_000, "multiplications", "H200", "segment_matmul_h200.csv", "up to this one does without them"
)
GRID_BLOCKS = bound(65535, "blocks", "CUDA", BUILT, "the most in a grid's second dimension")
# 64 x 64: 0.21 ms for five either way, and for 20 of 0.21 and 0.58; our kernel 0.32.
GROUPED_SEGMENTS = bound(
    6, "segments", "H200", "segment_matmul_h200.csv", "from this on torch's grouped product serves bfloat16"
)
GROUPED_CAPABILITIES = bound(
    (9, 10), "compute capability", "CUDA", BUILT, "versions on which torch's grouped product does not wait"
)
# By torch's grouped product, which does not divide the rows of a segment, in tiles of at least 128 x 128, of the
# longest segment; by our kernel of all; and what a product of torch's takes for each segment: 128 and 256 wide, 20 to
# 200 segments.
GROUPED_PS = bound(0.16, "ps a number", "H200", "segment_matmul_bf16_h200.csv", "what torch's grouped product takes")
SEGMENT_KERNEL_PS = bound(0.06, "ps a number", "H200", "segment_matmul_bf16_h200.csv", "what our kernel takes")
SEGMENT_PRODUCT_PS = bound(
    27_000_000, "ps a segment", "H200", "segment_matmul_bf16_h200.csv", "what a product of torch's takes"
)
GROUPED_TILE = bound(
    128, "rows and columns", "H200", "segment_matmul_bf16_h200.csv", "the least that torch's grouped product works on"
)

# ---- Edge types

# Rows that are copied cost more than calls from here on: one thread.
GAT_LAYERS_WORK = bound(
    1 << 27, "multiplications of the maps", "EPYC", MEASURED, "up to this GAT layers of all types are one node"
)
DOT_LAYERS_WORK = bound(1 << 24, "multiplications of the maps", "EPYC", MEASURED, "up to this TransformerConv's are")
RELATION_LAYERS_WORK = bound(
    1 << 24, "multiplications of the maps", "EPYC", MEASURED, "up to this layers of sums are, with the fewest calls"
)
RELATION_LAYERS_TINY = bound(
    1 << 22, "multiplications of the maps", "EPYC", MEASURED, "up to this layers on the CPU go one by one else"
)
TRAINED_WEIGHTS_TINY = bound(
    1 << 18, "features times layers", "EPYC", MEASURED, "up to this sums go one by one if weights of edges are trained"
)
# An estimate: on an H100's host a layer of PyG's took 0.8 ms, forward and backward.
SORTED_TOGETHER = bound(4, "layers of sums", "H100", REASONED, "from this on new edges of all types are sorted at once")
# One node of autograd for all layers spares 0.3 to 0.9 ms of calls for each type, in which six passes over so many
# bytes are made at 3 TB/s. The bound itself was not reached in a measurement.
ONE_NODE_BYTES = bound(
    300 << 20, "bytes of a layer", "H200", "hetero_ways_h200.csv", "up to this one node of autograd serves on a GPU"
)
# It does not divide the rows of a type: four of 10,000 rows take 0.30 ms, a product each 0.16; of 100,000 rows 3.5
# and 0.33 ms (64 outputs of 192 numbers). The bound is where these times would cross; the kernel that divides them
# was not timed.
BATCHED_MAP_ROWS = bound(
    1024, "rows of a type", "H200", MEASURED, "up to this gradients of maps are one batched product on a GPU"
)
# An H100 spends 1.33 ms of 1.66, a third of the rows having edges (4 types of 100,000 nodes, 8 of 40,000 edges, 64
# features), 0.19 of 0.25 with a tenth of both, and as long where three quarters have.
FILLED_ROWS_WORK = bound(
    1 << 27, "multiplications", "H100", "hetero_parts_h100.csv", "spared, from which empty rows are not mapped"
)
FILLED_ROWS_SHARE = bound(
    0.7, "share of rows", "H100", "hetero_parts_h100.csv", "with edges, up to which empty ones are not"
)
# A product's call, forward and backward, takes as long as so many multiplications: one thread.
FILLED_SUMS_WORK = bound(600_000, "multiplications", "EPYC", "hetero_epyc.csv", "the same on the CPU, for each product")
FILLED_SUMS_SHARE = bound(0.7, "share of rows", "EPYC", "hetero_epyc.csv", "the same on the CPU")
EDGE_READ_WORK = bound(8, "multiplications", "EPYC", MEASURED, "take as long as to read a number of an edge")
MATRIX_KEPT_WORK = bound(
    16, "multiplications", "EPYC", MEASURED, "take as long as to keep a number of a relation's matrix"
)
SCALED_SOURCES_DEGREE = bound(
    8, "edges of a row", "EPYC", MEASURED, "from this on sources are scaled for each graph, not edges"
)
SCALED_SOURCES_NUMBERS = bound(1 << 20, "numbers read", "EPYC", MEASURED, "from this on they are")
# These read as many features of each edge as there are bases.
BASES_ROWS = bound(
    2, "rows for one", "any", REASONED, "rows of relations for one of the bases, above which the bases map"
)
BASES_EDGES = bound(1 << 13, "edges", "H100", REASONED, "up to this factors of types are looked up by an index")
RELATION_CHUNK = bound(
    16384, "rows", "CPU", REASONED, "the least of a chunk of relations: fewer are too little for its calls"
)
RELATION_CHUNK_ON_CUDA = bound(64, "times", "CUDA", REASONED, "as many there, as calls take longer")
# One thread of a kernel adds such a row up while others wait. In the mean: up to here storing sums is much beside
# reading.
SHORT_RUN = bound(
    32, "edges of a row", "CUDA", REASONED, "up to this rows are added up where a product reads them: others wait"
)
SHORT_RUN_MEAN = bound(
    4, "edges of a row", "CUDA", REASONED, "up to this they are, as storing sums is much beside reading edges"
)
BY_SOURCE_SHARE = bound(
    0.9, "share of rows", "CUDA", REASONED, "below this rows by source are mapped, not rows by destination"
)
TOTALS_ROWS = bound(256, "rows", "CUDA", REASONED, "that one walk adds up for the sum over all rows of a result")
# With 1.3 times as many they take 0.87 of the time (one thread: 10,000 nodes of a type, 64 features, 4 heads). On
# CUDA the gradients of maps by head, a few values each from all nodes, are what takes long: 27 of 33 ms (100,000
# nodes).
HGT_MAPS_TIMES = bound(
    {"cuda": 8, "cpu": 2}, "times", "H200, EPYC", MEASURED, "up to this products of HGTConv's maps are made first"
)
HGT_MAPS_WORK = bound(1 << 26, "multiplications", "any", REASONED, "or up to so many more, on the side of calls")
# Where a source's keys and values are made only for edge types that it has edges of.
HGT_ROWS_TIMES = bound(
    1.5, "times", "H100", "hetero_parts_h100.csv", "what the kernel takes of torch's products, by rows with edges"
)
HGT_ROWS_CALL = bound(
    360_000_000, "multiplications", "H100", "hetero_parts_h100.csv", "what torch's call is worth, for each edge type"
)
# Up to here to bring those of all types together takes less than two products of torch's for each, of 15 us at least.
HGT_TOGETHER_BYTES = bound(
    {"cuda": 8 << 20}, "bytes", "H100", REASONED, "up to this gradients of all node types are one product"
)

# ---- Generated kernels

MESSAGE_CHUNK = bound(
    128, "edges", "CUDA", BUILT, "the least of a worker's piece without a list: rows_of of cuda/rows.cuh"
)
MESSAGE_CHUNKS = bound(8192, "workers", "CUDA", BUILT, "the most without a list")
MESSAGE_CALLS = bound(64, "calls", "any", REASONED, "so many a graph keeps")
MESSAGE_LANES = bound(32, "lanes", "CUDA", BUILT, "the most for a row")
# More than registers, but loops would be quadratic.
MESSAGE_SLOTS = bound(64, "features of a lane", "CUDA", REASONED, "the most for sums over features")
MESSAGE_EDGES = bound(4, "edges of a lane", "CUDA", REASONED, "that a lane reads at a time")
# 16 bytes of an edge: LEConv's walks 240 to 218 us.
MESSAGE_EDGES_LANES = bound(
    8, "lanes", "H200", MEASURED, "from this on it reads twice as many, of up to four values each"
)
MESSAGE_REGISTERS = bound(64, "values", "CUDA", REASONED, "the most that a lane reads at a time")
SUMS_AHEAD = bound(3, "sums", "any", REASONED, "up to so many a forward pass keeps for the backward one")
KERNEL_FILE_BYTES = bound(16 << 20, "bytes", "any", REASONED, "the most of a compiled kernel's file")
KERNEL_FILES = bound(2000, "files", "any", REASONED, "the most on disk, some 50 kB each: those used last stay")

# ---- Schedule

# A CUDA graph earns its work lists by this many: a sampled block passes through a few layers, or a few dozen, and is
# gone.
LASTING_USES = bound(50, "uses", "CUDA", REASONED, "from so many on a graph gets lists of work")
PIECE_LEAST = bound(32, "edges", "H200", "advisor_h200.csv", "the shortest pieces of rows, whatever rows have")
PIECE_LEAST_USUAL = bound(64, "edges", "H200", "advisor_h200.csv", "the shortest where most rows have as many")
PIECE_MOST = bound(256, "edges", "H200", "advisor_h200.csv", "the longest pieces of rows, whatever rows have")
PIECE_MOST_DENSE = bound(1024, "edges", "H200", "advisor_h200.csv", "the longest where most rows have as many")
# The narrowest have so little to do for an edge that the next piece costs more than waiting for it.
PIECE_SHARE = bound(1.3, "of a worker's share", "H200", "advisor_h200.csv", "where rows are cut")
PIECE_SHARE_NARROW = bound(
    2.6, "of a worker's share", "H200", "advisor_h200.csv", "where rows are cut, of features of up to 64 bytes"
)
# Vectors of 16 bytes.
LANE_NUMBERS = bound(4, "float32", "CUDA", BUILT, "of a lane of 16 bytes")
PROCESSOR_THREADS = bound(1536, "threads", "H200", BUILT, "that a multiprocessor holds in these kernels")
ROW_LANES = bound(16, "lanes of 16 bytes", "CUDA", BUILT, "the most of a worker by rows")
L2_BYTES = bound(50 << 20, "bytes", "H200", BUILT, "of L2, where torch does not say")
NARROW_ROW_BYTES = bound(
    128, "bytes of a row", "H200", "advisor_h200.csv", "up to this balance is worth more than locality"
)
# A power of two between lengths then matters more than where the hubs are.
LONG_ROWS_DEGREE = bound(
    20, "edges of a row", "H200", "advisor_h200.csv", "from this on rows go by powers of two of their length"
)
FEW_HUBS = bound(0.1, "share of edges", "H200", "advisor_h200.csv", "below this hubs go first on narrow rows")
HUB = bound(4, "times the mean degree", "H200", "advisor_h200.csv", "above this a row is a hub")
STREAMED_DEGREE = bound(8, "edges of a row", "H200", "advisor_h200.csv", "below this workers stream wide rows")
STREAMED_EDGES = bound(1_000_000, "edges", "H200", "advisor_h200.csv", "from this on they do")
HALVED_DEGREE = bound(256, "edges of a row", "H200", "advisor_h200.csv", "from this on workers have half the lanes")
HALVED_L2 = bound(
    (1.1, 2.2), "times L2", "H200", "advisor_h200.csv", "of sources, between which workers have half the lanes"
)
# Lanes of all edges for each thread on the chip, up to which saving a launch is worth it.
GROUPS_SMALL = bound(
    200, "lanes to a thread", "H200", "groups_h200.csv", "up to this groups of neighbours serve, which saves a launch"
)
GROUP_LEAST = bound(16, "edges", "H200", "groups_h200.csv", "the shortest groups")
GROUP_WORKERS = bound(
    16, "workers of a block", "H200", "groups_h200.csv", "where the search for a size of blocks starts"
)
# Where a warp takes half of a long row, which pays where each on the chip has something to do.
GROUP_LEAST_OF_WARP = bound(64, "edges", "H200", "groups_h200.csv", "the shortest groups for warps")
GROUP_WARPS = bound(4, "warps of a block", "H200", "groups_h200.csv", "where the search starts for warps")
GROUPS_EDGES = bound(
    20_000_000, "edges", "H200", "groups_h200.csv", "beyond this groups are not measured: whole rows were always faster"
)
GROUP_PRODUCTS = bound(1024, "products", "CUDA", BUILT, "that a thread is given: equation 3 of GNNAdvisor")
GROUP_SHARED_BYTES = bound(
    48 << 10, "bytes", "CUDA", BUILT, "of a block without asking for more: equation 4 of GNNAdvisor"
)
LISTED_ON_HOST = bound(20_000, "rows", "CUDA", REASONED, "up to this a list of work is made on the host")

# ---- Tiles

# Where the kernels for tensor cores are so much faster than those for CUDA cores that translation is repaid within
# about 30 epochs of two layers: docs/tensor-cores.md has the measurements.
TILES_EDGES = bound(200_000, "edges", "H200", "cuda_tiles_h200.csv", "from this on a graph may go by tiles")
TILES_REUSE = bound(
    4.0, "edges to a column", "H200", "cuda_tiles_h200.csv", "from this on tiles pay, in windows of 16 rows"
)
TILES_DEGREE = bound(16, "edges of a row", "H200", "cuda_tiles_h200.csv", "from this on in the mean they do")
TILES_FEATURES = bound({"sum": 64, "dot": 128}, "features", "H200", "cuda_tiles_h200.csv", "from this on they do")
TILES_NARROW_REUSE = bound(
    8.0, "edges to a column", "H200", "cuda_tiles_h200.csv", "from this on tiles pay for narrower sums too"
)
TILES_NARROW_DEGREE = bound(64, "edges of a row", "H200", "cuda_tiles_h200.csv", "from this on in the mean they do")
TILES_NARROW_FEATURES = bound(16, "features", "H200", "cuda_tiles_h200.csv", "from this on they do")
TILES_SAMPLE = bound(256, "windows", "CUDA", REASONED, "the most that reuse is estimated from")
TILES_SAMPLE_EDGES = bound(1 << 22, "edges", "CUDA", REASONED, "about the most that these have")
TILE_SIDE = bound(1024, "rows or columns", "any", BUILT, "the most of a block, whose bitmap is kept whole")
TILE_SLICE = bound(64, "features", "CUDA", BUILT, "that a warp takes")
TILE_TEAM = bound(8, "warps", "CUDA", BUILT, "the most to a window of inner products; half as many to one of sums")
TILE_TEAM_BLOCKS = bound(
    {"sum": 64, "dot": 4}, "blocks to a warp", "H200", "cuda_tile_warps_h200.csv", "for one more warp on a full GPU"
)
TILE_BUSY_WARPS = bound(
    4096, "warps", "H200", "cuda_tile_warps_h200.csv", "from this on a GPU is full: twice what it holds"
)
TILE_CHUNK = bound(256, "blocks", "CUDA", REASONED, "the least of a piece of a window")
TILE_CHUNKS = bound(4096, "pieces", "CUDA", REASONED, "the most, but for the ends of windows")
TILE_KEY_BITS = bound(64, "bits", "CUDA", BUILT, "the most of window, row and column in one number")

# ---- Orders

# Four sums of 64 features, a thousand epochs: an order takes 20 ms and more, and saves a fifth of some 25
# microseconds. Rows of a small graph are in L2 anyway (fb15k237, by rule: 10 to 15 % slower).
ORDER_EDGES = bound(500_000, "edges", "H200", "advisor_reorder_h200.csv", "from this on an order is repaid")
# An order that saved a tenth won nothing on dd.npz, one that saved more always did.
ORDER_GAIN = bound(
    0.1, "share of sources read", "H200", "advisor_reorder_h200.csv", "an order that saves less is not kept"
)
ORDER_WINDOW = bound(8192, "edges", "CUDA", REASONED, "that the warps of a multiprocessor work on at a time")
ORDER_WINDOWS = bound(4, "windows", "CUDA", REASONED, "a graph of fewer lies in the caches in any order")
ORDER_BLOCK = bound(256, "rows", "CUDA", REASONED, "that a graph given in a good order keeps together")
ORDER_LOCAL = bound(
    0.85, "share of sources read", "CUDA", REASONED, "up to this, of what rows by length read, the given order is good"
)
ORDER_COMMUNITY = bound(4096, "nodes", "CUDA", REASONED, "the most of a community that rows are ordered by")
ORDER_COMMUNITY_DENSE = bound(16384, "nodes", "CUDA", REASONED, "the most of one in a dense graph")
ORDER_DENSE_DEGREE = bound(128, "edges of a row", "CUDA", REASONED, "from this on a graph is dense here")
# On the graphs of benchmarks/graphs.py and six real ones, by the reuse of the order that results: 4 to 12 passes, 4
# to 16 chunks and settling at 1 to 5 % are within 2 % of each other.
COMMUNITY_PASSES = bound(5, "passes", "CPU", MEASURED, "the most at one level")
COMMUNITY_SETTLED = bound(0.02, "share of nodes", "CPU", MEASURED, "up to this still move when a level ends")
COMMUNITY_CHUNKS = bound(
    4, "chunks", "CPU", MEASURED, "the least: nodes of one move at once, knowing nothing of each other"
)
COMMUNITY_JOINED = bound(0.1, "share of nodes", "any", REASONED, "above this join another for a next level")
COMMUNITY_GAMMA_STEP = bound(4.0, "times", "any", REASONED, "by which the resolution falls from one level to the next")
COMMUNITY_CHUNK_EDGES = bound(1 << 24, "edges", "CUDA", REASONED, "the most of a chunk, at some 100 bytes each")
BUSY_SOURCE = bound(1 << 16, "edges of a source", "any", REASONED, "beyond this a graph has hubs among its sources")

# ---- Measuring

MEASURE_MS = bound(1000.0, "ms", "any", REASONED, "for a graph and its transposed, at all widths")
LONG_CALL_MS = bound(5.0, "ms", "any", REASONED, "calls that take longer are timed less often")
PLAN_PAYS = bound(0.97, "of the time of what is there", "any", REASONED, "up to this a plan is better: less is noise")
PLAN_CALLS = bound(5, "calls", "CUDA", REASONED, "whose median is a plan's time")
PLAN_FEW_CALLS = bound(2, "calls", "CUDA", REASONED, "the same of calls that take long")
PLAN_CAPS = bound((32, 2048), "edges", "CUDA", REASONED, "the shortest and the longest pieces that are tried")
HEAD_START = bound(200_000, "cycles", "CUDA", REASONED, "that the device spins for each call that the host queues")
ORDER_CALLS = bound(9, "calls", "CPU", REASONED, "whose median is compared, with an order and without")
ORDER_NO_SLOWER = bound(
    1.01, "of the time of what is there", "CPU", REASONED, "the most that an order may take: as much is noise"
)
ORDER_NARROW = bound(16, "features", "CPU", REASONED, "below this an order is timed with 8 and 2 features too")

# ---- Sampling

TABLE_NODES = bound(1 << 27, "nodes", "CPU", REASONED, "up to this a batch has a table of all nodes; more are hashed")
# At some 70 bytes each: enough of them that a GPU is busy.
EDGES_AT_ONCE = bound(1 << 22, "edges", "CUDA", REASONED, "that are looked at in one go")
# At 32 bytes each and a thread that may find nothing to do. With more of them it does not matter how long it takes to
# ask for their number. Of a batch, four times as many.
BOUNDED_EDGES = bound(
    1 << 22, "edges of a step", "CUDA", REASONED, "up to this room is made for a step before its edges are counted"
)
HGT_SHARED = bound(
    50, "sources", "any", BUILT, "the most that a node gives something to, of one relation: cpp/layer_sample.cpp"
)
WALK_ROUNDS = bound(16, "rounds", "CUDA", REASONED, "of draws that may be rejected; then all neighbours are weighed")
BATCHES_AHEAD = bound(2, "steps", "CUDA", REASONED, "that the host may be ahead, unless the user says")
BATCH_PLANS = bound(256, "plans", "any", REASONED, "so many are kept: batches of a problem are of one size, or of two")
CACHE_CHUNK_BYTES = bound(1 << 26, "bytes", "CUDA", REASONED, "of features that are copied to a cache at a time")
ELEMENT_BYTES = bound(8, "bytes", "CUDA", BUILT, "the most of a number that kernels copy")
PAGE_BYTES = bound(4096, "bytes", "any", BUILT, "of a page of memory")
PINNED_NUMBERS = bound(4096, "numbers", "CUDA", REASONED, "longer tensors of DGL's go through pinned memory")

# ---- Capture

CAPTURE_WARMUP = bound(
    3, "calls", "CUDA", REASONED, "alike, that run as they are before a capture; the last is watched"
)
CAPTURE_VARIANTS = bound(4, "captures", "CUDA", REASONED, "the most of a module or step: the oldest goes first")
CAPTURE_ATTEMPTS = bound(2, "attempts", "CUDA", REASONED, "that may fail before a kind of call is left")
CAPTURE_REASONS = bound(32, "kinds of calls", "CUDA", REASONED, "left, after which all are")
CAPTURE_EARNED = bound(
    8, "replays", "CUDA", REASONED, "that a capture must be followed by in the mean for there to be more"
)
CAPTURE_CROWDED = bound(
    2, "calls", "CUDA", REASONED, "that find their capture waiting for its backward, before another is made"
)
CAPTURE_LOOKS = bound(
    256, "looks", "CUDA", REASONED, "in vain, after which one in so many calls of layers looks for a module"
)
CAPTURE_REHEARSALS = bound(
    2, "backward passes", "CUDA", REASONED, "that run as they are: for lists of work, and to see what waits for the GPU"
)
CAPTURE_BACKWARDS = bound(4, "backward passes", "CUDA", REASONED, "the most of one forward")
CAPTURE_REACH = bound(
    50_000, "objects", "CUDA", REASONED, "the most that a step may reach: more than a model and its optimizer hold"
)
CAPTURE_ARRAY_BYTES = bound(1 << 20, "bytes", "CUDA", REASONED, "larger arrays of NumPy are not compared")

# ---- Parts

PARTS_EDGE_SLACK = bound(0.03, "share", "CPU", REASONED, "by which a part's edges may be above the mean")
PARTS_NODE_SLACK = bound(0.25, "share", "CPU", REASONED, "by which a part's nodes may be above the mean")
PARTS_PASSES = bound(24, "passes", "CPU", REASONED, "the most at one level")
PARTS_WORTH = bound(1e-3, "share of the cut", "CPU", REASONED, "that two passes must gain to go on")
PARTS_COLUMNS = bound(16, "parts", "any", REASONED, "whose neighbours are counted at a time")
PARTS_EDGES = bound(1 << 23, "edges", "any", REASONED, "whose ends are counted at a time")
PARTS_COUNTED = bound(96, "parts", "CPU", MEASURED, "up to this neighbours are counted for each part; more are sorted")
PARTS_COMMUNITIES = bound(20, "communities of a part", "CPU", REASONED, "the least of the smallest graph that is cut")
PARTS_GROWN = bound(4096, "nodes", "CPU", REASONED, "up to this parts are grown, which looks at all for each node")
PARTS_STARTS = bound(8, "starts", "CPU", REASONED, "from other nodes, that parts are grown from")
PARTS_SWEEPS = bound(6, "sweeps", "CPU", REASONED, "of moves of single nodes")
PARTS_PATIENCE = bound(500, "moves", "CPU", REASONED, "without a better cut that end a sweep, at least")
PARTS_PATIENT = bound(50, "nodes to a move", "CPU", REASONED, "for each such move on large graphs")
PARTS_SUMS = bound(
    1 << 22, "nodes times parts", "CPU", REASONED, "up to this gains are kept for all; or up to half as many as edges"
)
PARTS_OVERLOAD = bound(
    20.0, "times", "CPU", REASONED, "that a cut counts more for each share of the load above the caps"
)
PARTS_LARGE = bound(2, "to a cap", "CPU", REASONED, "a community above a part's cap over this is large")
PARTS_LARGE_SHARE = bound(
    0.02, "share of the load", "CPU", REASONED, "above this of large communities a smaller graph is not cut"
)
PARTS_CARRIED = bound(4, "cuts", "CPU", REASONED, "that are carried on to the next level")
PARTS_CARRIED_EDGES = bound(1 << 21, "edges", "CPU", REASONED, "up to this of a level they are; then one is")
# Peaks of SAGE, GCN and GAT; GIN's as SAGE's, which sums alike. edge_index, numbers of edges, the graph each way,
# inside and across, with loops; and what making it takes at most.
ESTIMATED_EDGE_BYTES = bound(
    {"gcn": 81, "sage": 90, "gin": 90, "gat": 127},
    "bytes",
    "H100",
    "distributed_1_reddit_h100.csv",
    "of an edge of a part",
)
ESTIMATED_NODE_BYTES = bound(
    40, "bytes", "H100", "distributed_1_reddit_h100.csv", "of a node of a part, beside its features"
)
# Norms, sums of inner and outer edges, bias, ReLU, their gradients.
ESTIMATED_PASSES = bound(24, "passes", "any", REASONED, "over a layer's results in an epoch")
# Gathered, read, written, summed up where they come back.
ESTIMATED_PACKING = bound(4, "passes", "any", REASONED, "over rows that are sent")
ESTIMATED_ROWS = bound(3, "times all rows", "any", REASONED, "of the widest layer that are there for a moment")

# ---- Memory and files

HEAP_BYTES = bound((32 << 20) - (8 << 10), "bytes", "CPU", BUILT, "the largest freed block that glibc heeds")
KEPT_VALUES = bound(
    64, "values", "any", REASONED, "of one tensor that are kept: sizes and flags that a script passes without end"
)
HASHED_EDGES = bound(1 << 24, "edges", "any", REASONED, "that are hashed at a time")
DEFLATED = bound(1032, "bytes for one", "any", BUILT, "the most that deflate makes of one")
ORDER_FILE_BYTES = bound(1 << 16, "bytes", "any", REASONED, "the most of a file of an order beside the order")
PLAN_FILE_BYTES = bound(1 << 24, "bytes", "any", REASONED, "the most of a file of plans")
PLAN_NUMBERS = bound(1 << 20, "edges or features", "any", REASONED, "the most in a plan's file")
MANIFEST_BYTES = bound(1 << 26, "bytes", "any", REASONED, "the most of a manifest of parts")
PROGRESS_QUIET_S = bound(2.0, "seconds", "any", REASONED, "after which a run shows how far it is")
PROGRESS_LOG_S = bound(10.0, "seconds", "any", REASONED, "between lines of the log")
