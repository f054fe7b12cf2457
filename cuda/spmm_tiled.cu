// SpMM on tensor cores, by tiles of a translated graph (cpp/types.h: Tiles; TC-GNN: Wang, Feng and Ding, USENIX ATC
// 2023).
//
// A warp takes a window of 16 rows, or a piece of one that has many blocks, for a slice of the features. Of each block
// it gathers the rows of x that the 8 columns stand for, once for all rows of the window, straight into the registers
// of the matrix instruction: x is the instruction's wide operand, transposed, and the block, 0 and 1 or weights made of
// its bitmap in registers, its narrow one (m16n8k8: 16 features, 8 rows, 8 columns; operands swapped as in
// FlashSparse, Shi et al., 2025). Which features are rows of an instruction is free, so a lane takes 16 bytes of
// neighbouring ones per gather. No shared memory, no barriers; the gathers of the next block are under way while this
// one is multiplied.
//
// Accurate to float32: x is split into its upper 11 bits and the rest, whose upper 11 are kept, and so are weights; 0
// and 1 are exact. The instruction's sums drop bits, so they are added to sums of float32 every few blocks.
//
// A value that is not finite would reach all rows of its window, as 0 * NaN. Where a result is not finite the piece is
// summed again row by row.
#include "mma.cuh"
#include "rows.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 128;
  static constexpr int merge_threads = 256;
  static constexpr int height = 16;   // of a window: two instructions side by side
  static constexpr int width = 8;     // of a block
  static constexpr int halves = 2;    // of a window, 8 rows each
  static constexpr int promote = 16;  // blocks summed up by the instruction alone: 1e-6 of error at 256, 3e-7 at 16
  static_assert(height == 8 * halves, "an instruction has 8 rows");
};

template <typename I>
struct Params {
  Rows<I> windows;  // in place of rows, with blocks in place of nonzeros
  const I* indptr;
  const I* columns;
  const uint64_t* bits;
  const I* block_ptr;
  const float* x;
  const float* weight;  // in the order of tiles.edges, or null
  float* out;
  float* parts;  // [num_parts, height, num_feats], in the workspace
  int64_t num_rows;
  int num_feats;
  bool mean;
};

// Of V features of a lane, 4 in a row at every 32 (2 at every 16): feature i is at step_of(i).
template <int V>
__device__ __forceinline__ int feature_of(int group, int i) {
  constexpr int chunk = V < 4 ? V : 4;
  return i / chunk * 8 * chunk + group * chunk + i % chunk;
}

template <int V, typename I>
__device__ __forceinline__ void gather(const float* x, I column, int num_feats, int first, int group, float (&to)[V]) {
  constexpr int chunk = V < 4 ? V : 4;
#pragma unroll
  for (int i = 0; i < V; i += chunk) {
    const int d = first + feature_of<V>(group, i);
    Pack<float, chunk> values;
    values.raw = {};
    if (column >= 0 && d < num_feats) load(row_address(x, column, num_feats) + d, values);
#pragma unroll
    for (int j = 0; j < chunk; ++j) to[i + j] = values.values[j];
  }
}

// What is kept of a sum with 11 bits, and what that leaves.
__device__ __forceinline__ void split(float value, uint32_t& high, uint32_t& low) {
  high = __float_as_uint(value) & 0xFFFFE000u;
  low = __float_as_uint(value - __uint_as_float(high));
}

// The row's count, for a mean.
template <typename I>
__device__ __forceinline__ float divisor_of(const Params<I>& p, int64_t row) {
  if (!p.mean) return 1;
  const I degree = __ldg(p.indptr + row + 1) - __ldg(p.indptr + row);
  return degree > 1 ? static_cast<float>(degree) : 1.f;
}

template <typename I, int V, bool WEIGHTED, bool FAST>
__global__ void __launch_bounds__(Config::threads, V > 4 ? 3 : 4) windows_kernel(const Params<I> p) {
  constexpr int halves = Config::halves, width = Config::width, tiles = V / 2;
  const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
  const Span<I> span = span_of(p.windows, static_cast<int64_t>(blockIdx.x) * (Config::threads / 32) + threadIdx.x / 32);
  if (!span.present) return;             // a whole warp
  const int first = blockIdx.y * 8 * V;  // feature of the slice

  float sum[halves][tiles][4] = {};
  float part[halves][tiles][4] = {};
  // What a block needs is asked for one block ahead, and two ahead what says where that is: columns, and for weights
  // the bitmap and the number of nonzeros before the block.
  float x[2][V], next_x[2][V];                      // of the columns `member` and `member` + 4
  float weight[halves][2], next_weight[halves][2];  // of the row `group` of each half, in these columns
  uint64_t words[halves], next_words[halves], later_words[halves];
  I column[2];
  int64_t later_start = 0;
  auto find = [&](I block) {
    const bool present = block < span.end;
#pragma unroll
    for (int c = 0; c < 2; ++c) column[c] = present ? __ldg(p.columns + block * width + 4 * c + member) : I{-1};
#pragma unroll
    for (int h = 0; h < halves; ++h) {
      later_words[h] = present ? __ldg(p.bits + static_cast<int64_t>(block) * halves + h) : 0;
    }
    if (WEIGHTED && present) later_start = __ldg(p.block_ptr + block);
  };
  auto fetch = [&]() {
    int64_t start = later_start;
#pragma unroll
    for (int h = 0; h < halves; ++h) {
      next_words[h] = later_words[h];
      if constexpr (WEIGHTED) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int bit = 8 * group + 4 * c + member;
          const int64_t own = start + __popcll(next_words[h] & ((uint64_t{1} << bit) - 1));
          next_weight[h][c] = next_words[h] >> bit & 1 ? __ldg(p.weight + own) : 0.f;
        }
        start += __popcll(next_words[h]);
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) gather<V>(p.x, column[c], p.num_feats, first, group, next_x[c]);
  };

  find(span.begin);
  fetch();
  find(span.begin + 1);
  int blocks = 0;
#pragma unroll 1
  for (I block = span.begin; block < span.end; ++block) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int i = 0; i < V; ++i) x[c][i] = next_x[c][i];
#pragma unroll
      for (int h = 0; h < halves; ++h) weight[h][c] = next_weight[h][c];
    }
#pragma unroll
    for (int h = 0; h < halves; ++h) words[h] = next_words[h];
    fetch();
    find(block + 2);
    uint32_t narrow[halves][2], rest[halves][2];
#pragma unroll
    for (int h = 0; h < halves; ++h) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float value = WEIGHTED ? weight[h][c] : words[h] >> (8 * group + 4 * c + member) & 1 ? 1.f : 0.f;
        split(value, narrow[h][c], rest[h][c]);
        if (FAST) narrow[h][c] = to_tf32(value);
      }
    }
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = x[i / 2][2 * j + i % 2];
        split(value, high[i], low[i]);
        if (FAST) high[i] = to_tf32(value);
      }
#pragma unroll
      for (int h = 0; h < halves; ++h) {
        multiply_add(part[h][j], high, narrow[h][0], narrow[h][1]);
        if (!FAST) multiply_add(part[h][j], low, narrow[h][0], narrow[h][1]);
        if (!FAST && WEIGHTED) multiply_add(part[h][j], high, rest[h][0], rest[h][1]);
      }
    }
    if (++blocks % Config::promote == 0 || block + 1 == span.end) {
#pragma unroll
      for (int h = 0; h < halves; ++h) {
#pragma unroll
        for (int j = 0; j < tiles; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[h][j][i] += part[h][j][i];
            part[h][j][i] = 0;
          }
        }
      }
    }
  }

  // sum[h][j][2 * b + r]: feature 2 * j + b of the lane, row 2 * member + r of the half.
  bool finite = true;
#pragma unroll
  for (int h = 0; h < halves; ++h) {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) finite = finite && isfinite(sum[h][j][i]);
    }
  }
  if (__any_sync(~0u, !finite)) {  // row by row, so that a row gets what is its own alone
#pragma unroll
    for (int h = 0; h < halves; ++h) {
#pragma unroll
      for (int j = 0; j < tiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[h][j][i] = 0;
      }
    }
#pragma unroll 1
    for (I block = span.begin; block < span.end; ++block) {
      int64_t at = __ldg(p.block_ptr + block);
#pragma unroll 1
      for (int h = 0; h < halves; ++h) {
        const uint64_t word = __ldg(p.bits + static_cast<int64_t>(block) * halves + h);
#pragma unroll 1
        for (int bit = 0; bit < 64; ++bit) {
          if (!(word >> bit & 1)) continue;
          const float factor = WEIGHTED ? __ldg(p.weight + at) : 1.f;
          ++at;
          const int row = bit / width;
          if (row / 2 != member) continue;
          gather<V>(p.x, __ldg(p.columns + block * width + bit % width), p.num_feats, first, group, x[0]);
#pragma unroll
          for (int half = 0; half < halves; ++half) {
            if (half != h) continue;
#pragma unroll
            for (int i = 0; i < V; ++i) {
              float* to = sum[half][i / 2] + 2 * (i % 2);
              if (row % 2) {
                to[1] += factor * x[0][i];
              } else {
                to[0] += factor * x[0][i];
              }
            }
          }
        }
      }
    }
  }

  constexpr int chunk = V < 4 ? V : 4;
#pragma unroll
  for (int h = 0; h < halves; ++h) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int inside = 8 * h + 2 * member + r;
      const int64_t row = static_cast<int64_t>(span.row) * Config::height + inside;
      if (row >= p.num_rows) continue;
      const bool whole = span.part < 0;
      float* to = whole ? p.out + row * p.num_feats
                        : p.parts + (span.part * Config::height + inside) * static_cast<int64_t>(p.num_feats);
      const float divisor = whole ? divisor_of(p, row) : 1.f;
#pragma unroll
      for (int i = 0; i < V; i += chunk) {
        const int d = first + feature_of<V>(group, i);
        if (d >= p.num_feats) continue;
        Pack<float, chunk> values;
#pragma unroll
        for (int j = 0; j < chunk; ++j) values.values[j] = sum[h][(i + j) / 2][2 * ((i + j) % 2) + r] / divisor;
        store(to + d, values);
      }
    }
  }
}

// Windows in pieces, a block each: that of a chunk in which such a window begins, see pieces_of. (merge_pieces of
// pieces.cuh would look for it once for every 32 of the height * num_feats values.)
template <typename I>
__global__ void __launch_bounds__(Config::merge_threads) merge_kernel(const Params<I> p) {
  const Pieces<I> pieces = pieces_of(p.windows, blockIdx.x);
  const int64_t size = static_cast<int64_t>(Config::height) * p.num_feats;
  for (int64_t at = threadIdx.x; pieces.count && at < size; at += Config::merge_threads) {
    const int64_t row = pieces.row * Config::height + at / p.num_feats;
    if (row >= p.num_rows) continue;
    float sum = 0;
    for (int64_t j = 0; j < pieces.count; ++j) sum += p.parts[pieces[j] * size + at];
    p.out[row * p.num_feats + at % p.num_feats] = sum / divisor_of(p, row);
  }
}

// Windows and blocks in place of rows and nonzeros.
template <typename I>
Rows<I> windows_of(const Csr& graph, const Tiles& tiles) {
  Csr windows = graph;
  windows.indptr = tiles.window_ptr;
  windows.num_rows = ceil_div(graph.num_rows, Config::height);
  windows.nnz = tiles.num_blocks;
  Rows<I> rows = rows_of<I>(windows, WorkList{});
  if (tiles.longest <= rows.chunk) {  // none in pieces
    rows.workers = rows.num_rows;
    rows.num_parts = rows.num_splits = 0;
  }
  return rows;
}

template <typename I, int V>
cudaError_t launch(const Params<I>& p, bool fast, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.windows.workers, Config::threads / 32)),
                  static_cast<unsigned>(ceil_div(p.num_feats, 8 * V)));
  auto run = [&](auto weighted, auto rounded) {
    windows_kernel<I, V, weighted, rounded><<<grid, Config::threads, 0, stream>>>(p);
    return cudaGetLastError();
  };
  using std::false_type;
  using std::true_type;
  if (p.weight) return fast ? run(true_type{}, true_type{}) : run(true_type{}, false_type{});
  return fast ? run(false_type{}, true_type{}) : run(false_type{}, false_type{});
}

}  // namespace

int64_t spmm_tiled_workspace_bytes(const Csr& graph, const Tiles& tiles, int64_t num_feats) {
  const int64_t parts = windows_of<int32_t>(graph, tiles).num_parts;
  return parts * Config::height * num_feats * static_cast<int64_t>(sizeof(float));
}

cudaError_t spmm_tiled(const Csr& graph, const Tiles& tiles, const void* x, const void* weight, void* out,
                       int64_t num_feats, bool mean, bool fast, DType dtype, void* workspace, int64_t workspace_bytes,
                       cudaStream_t stream) {
  if (graph.num_rows == 0 || num_feats == 0) return cudaSuccess;
  if (dtype != DType::f32 || tiles.height != Config::height || tiles.width != Config::width || num_feats % 4 ||
      workspace_bytes < spmm_tiled_workspace_bytes(graph, tiles, num_feats)) {
    return cudaErrorInvalidValue;
  }
  return with_index(graph.index_type, [&](auto index) {
    using I = decltype(index);
    Params<I> p{};
    p.windows = windows_of<I>(graph, tiles);
    p.indptr = static_cast<const I*>(graph.indptr);
    p.columns = static_cast<const I*>(tiles.columns);
    p.bits = static_cast<const uint64_t*>(tiles.bits);
    p.block_ptr = static_cast<const I*>(tiles.block_ptr);
    p.x = static_cast<const float*>(x);
    p.weight = static_cast<const float*>(weight);
    p.out = static_cast<float*>(out);
    p.parts = static_cast<float*>(workspace);
    p.num_rows = graph.num_rows;
    p.num_feats = static_cast<int>(num_feats);
    p.mean = mean;
    const cudaError_t status = num_feats <= 16   ? launch<I, 2>(p, fast, stream)
                               : num_feats <= 32 ? launch<I, 4>(p, fast, stream)
                                                 : launch<I, 8>(p, fast, stream);
    if (status != cudaSuccess || p.windows.num_splits == 0) return status;
    merge_kernel<I><<<static_cast<unsigned>(p.windows.num_splits), Config::merge_threads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace gnnaccel
