// Plain types shared by the CPU and the CUDA half. Nothing here knows torch or Python.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define GNNACCEL_HOST_DEVICE __host__ __device__
#else
#define GNNACCEL_HOST_DEVICE
#endif

namespace gnnaccel {

enum class DType : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3 };
enum class IndexType : int { i32 = 0, i64 = 1 };

// What one nonzero sends to its row. `lhs` is a feature of the source (column), `rhs` one of the edge.
// sub and div are add(-rhs) and mul(1/rhs) by the time they arrive here.
enum class Message : int { copy_lhs = 0, copy_rhs = 1, mul = 2, add = 3 };
enum class Reduce : int { sum = 0, mean = 1, max = 2, min = 3 };

// What an SDDMM computes for one nonzero from its two operands.
enum class EdgeOp : int { copy_lhs = 0, copy_rhs = 1, add = 2, sub = 3, mul = 4, div = 5, dot = 6 };
// Whose feature an SDDMM operand is: the source (column), the destination (row) or the edge itself.
enum class Target : int { u = 0, v = 1, e = 2 };

// A sparse matrix in CSR: rows are destinations, columns are sources.
struct Csr {
  // [num_rows + 1], of index_type, starts at 0, ascending. On CUDA it may end before nnz: the nonzeros behind are of no
  // row, under ids of no edge, and a 0 is behind indptr then (gnnaccel/ops/_packed.py).
  const void* indptr;
  const void* indices;   // [nnz], of index_type, in [0, num_cols); null where no source is read
  const void* edge_ids;  // [nnz], of index_type: row of nonzero k in an edge operand; null: k itself
  int64_t num_rows;
  int64_t num_cols;
  int64_t nnz;
  IndexType index_type;
  int64_t longest;  // nonzeros of the longest row, or 0: not known; on CUDA
};

// The rows of a graph in the order in which they are to be worked on, long ones in pieces:
// gnnaccel/schedule/worklist.py. Of CUDA alone.
enum class SpmmKernel : int { rows = 0, balanced = 1, groups = 2 };

// Elements of the graph's index_type; null items: no list, rows are taken as they come.
// Piece j of a row in m pieces has the nonzeros of the row's runs j, j + m, j + 2m ... of kPieceRun (cuda/kernels.h)
// nonzeros each.
// With SpmmKernel::groups the items are groups of neighbours: the end is the group's, and a part is what `workers`
// items from a multiple of that number on have of a row that others have groups of too; steps are kPieceRun. Such a
// list is for sums and means, and for whoever takes nonzeros one by one.
struct WorkList {
  const void* items;   // [num_items, 4]: row, first nonzero, end of the row, 0 or 1 + number of the piece
  const void* steps;   // [num_parts]: from one run of the piece to its next, m * kPieceRun
  const void* splits;  // [num_splits, 4]: row, its first piece, number of pieces, degree
  int64_t num_items;
  int64_t num_parts;
  int64_t num_splits;
  bool clustered;     // neighbours in the list share sources
  SpmmKernel kernel;  // which kernel is to serve a sum or mean
  int lanes;          // 16-byte lanes of a worker's slice: 4, 8, 16 or, not by rows, 32; 0: spmm.cu decides
  int workers;        // of a block, by groups
  int64_t longest;    // nonzeros of the longest row
};

// One feature operand, row-major and contiguous. Feature d of the (broadcast) result reads element
// (d / div) % len of the operand's row: len = D, div = 1 is a full row, len = 1 one scalar per row,
// len = H, div = D / H one scalar per head, len = F, div = 1 with F < D the same F values for each head.
struct Operand {
  const void* data;  // [rows, len]; null where the message does not read it
  int64_t len;
  int64_t div;
};

// What a layer does around a sum, in the same pass; all null: nothing. Scales have the dtype of accumulators: f64 for
// f64, else f32.
//   out[r] = act(row_scale[r] * sum over nonzeros of source_scale[column] * message + own_factor * own[r] + bias)
struct Fused {
  const void* source_scale;   // [num_cols], or null
  const void* source_indptr;  // [num_cols + 1] of index_type, or null: instead of source_scale, one over the number
                              // source_indptr[c + 1] - source_indptr[c] of column c, which is at least 1
  const void* row_scale;      // [num_rows], or null
  const void* bias;           // [num_feats] of dtype, or null
  const void* own;            // [num_rows, num_feats] of dtype, or null
  const void* own_factor;     // where there is `own` a number, of the dtype of scales
  bool relu;                  // act: what is below 0 becomes 0
  bool wide;                  // CUDA, of 16-bit features: bias and out are of f32

  bool scales_sources() const { return source_scale || source_indptr; }
  bool empty() const { return !scales_sources() && !row_scale && !bias && !own && !relu && !wide; }
};

// Sparse graph translation (TC-GNN, USENIX ATC 2023): rows in windows of `height`; the distinct columns of a window, in
// ascending order, side by side in blocks of height x width. A block's nonzeros are bits: that of row r and column c is
// bit r * width + c of its ceil(height * width / 64) words. Where a row has a column several times, so has the window.
struct Tiles {
  const void* window_ptr;  // [num_windows + 1]: first block of each window; all arrays but `bits` are of index_type
  const void* columns;     // [num_blocks, width]: source of each column of a block; -1: none
  const void* bits;        // [num_blocks, words], uint64
  const void* block_ptr;   // [num_blocks + 1]: first nonzero of each block in `edges`
  const void* edges;       // [nnz]: edge ids, block by block, in a block by bit
  int64_t num_blocks;
  int64_t longest;  // blocks that a window has at most
  int64_t height;
  int64_t width;
  int64_t team;   // CUDA: warps that share a window: 1, 2, 4 or 8
  int64_t chunk;  // CUDA: a window of more blocks is cut
};

// What the weight of edge e in head h is multiplied with: scale[e, h], times what a dropout makes of 1. Whether that is
// 0 depends on the seed and on e * num_heads + h alone, so that a backward finds the same weights dropped.
struct EdgeFactor {
  const void* scale;  // [nnz, num_heads] of the features' dtype, or null
  const void* seed;   // one int64 where the features are, or null: no dropout
  double dropout;     // the part that is dropped, in [0, 1)
};

// Output `counter` of SplitMix64 (Steele, Lea and Flood, 2014) from `seed`. Static: not to be shared between
// instruction sets.
GNNACCEL_HOST_DEVICE static inline uint64_t splitmix64(uint64_t seed, uint64_t counter) {
  uint64_t z = seed + (counter + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// The hash that decides it: a weight is dropped if this is below dropout * 2^32. gnnaccel/ops/reference.py has it in
// torch.
GNNACCEL_HOST_DEVICE static inline uint32_t dropout_bits(uint64_t seed, uint64_t counter) {
  return static_cast<uint32_t>(splitmix64(seed, counter) >> 32);
}
static inline uint32_t dropout_threshold(double dropout) { return static_cast<uint32_t>(dropout * 4294967296.0); }

// Attention with given scores, those of inner products, or their sum (kernels.h). What a direction does not read or
// write is null.
struct DotAttention {
  const void* query;      // [num_rows, width], or null, with key: the scores are edge_bias
  const void* key;        // [num_cols, width]
  const void* value;      // [num_cols, width]
  const void* edge_bias;  // [nnz, num_heads] of the features' dtype, or null
  EdgeFactor factor;
  void* out;             // [num_rows, width]
  void* stats;           // [num_rows, num_heads, 2]
  const void* ends;      // [num_rows, num_heads, 4]
  const void* grad_out;  // [num_rows, width]
  void* grad_query;      // as query, and so on
  void* grad_key;
  void* grad_value;
  void* grad_scores;  // [nnz, num_heads]
  double scale;       // of the inner products
  int64_t num_heads;
  int64_t width;
  DType dtype;

  enum class Mode { forward, rows, columns };
  Mode mode() const { return out ? Mode::forward : grad_query ? Mode::rows : Mode::columns; }
};

// A matrix [rows, num_feats] of which each row keeps k entries: the CBSR of MaxK-GNN.
struct Compressed {
  const void* values;  // [rows, k]
  const void* places;  // [rows, k]: the feature of each, ascending in a row; uint8 up to 256 features, else uint16
  int64_t k;           // 1 to num_feats
  int64_t num_feats;   // 1 to 65536
};

}  // namespace gnnaccel
