// SpMM on tensor cores, by tiles of a translated graph (cpp/types.h: Tiles; TC-GNN: Wang, Feng and Ding, USENIX ATC
// 2023).
//
// A warp takes blocks of a window of 16 rows (tiles.cuh) for a slice of the features. Of each block it gathers the rows
// of x that the 8 columns stand for, once for all rows of the window, straight into the registers of the matrix
// instruction: x is the instruction's wide operand, transposed, and the block, 0 and 1 or weights made of its bitmap in
// registers, its narrow one (16 features, 8 rows, 8 columns; of 16-bit types the columns of two blocks at a time;
// operands swapped as in FlashSparse, Shi et al., 2025). Which features are rows of an instruction is free, so a lane
// takes 16 bytes of neighbouring ones per gather. No shared memory but to add up what the warps of a team have; the
// gathers of the next step are under way while this one is multiplied.
//
// Accurate to float32: x is split into its upper 11 bits and the rest, whose upper 11 are kept, and so are weights; 0
// and 1 are exact. The instruction's sums drop bits, so they are added to sums of float32 every few blocks. Products of
// 16-bit types are exact, and their sums better than what they are rounded to.
//
// A value that is not finite would reach all rows of its window, as 0 * NaN. Where a result is not finite the warp's
// blocks are summed again row by row.
#include "tiles.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

constexpr int kMergeThreads = 256;
constexpr int kPromote = 16;  // blocks summed up by the instruction alone: 1e-6 of error at 256, 3e-7 at 16
constexpr int halves = TileConfig::halves, width = TileConfig::width, height = TileConfig::height;

template <typename T, typename I>
struct Params {
  Windows<I> windows;
  const I* indptr;
  const T* x;
  const T* weight;  // by edge id, or null
  T* out;
  float* parts;  // [num_parts, height, num_feats], in the workspace
  int64_t num_rows;
  int num_feats;
  bool mean;
};

// V features of a lane, of 8 * V of the warp.
template <typename T, int V, bool WEIGHTED>
struct Shape {
  static constexpr int chunk = V < 16 / static_cast<int>(sizeof(T)) ? V : 16 / static_cast<int>(sizeof(T));  // in a row
  static constexpr int words = V * static_cast<int>(sizeof(T)) / 4;
  static constexpr int chunk_words = chunk * static_cast<int>(sizeof(T)) / 4;
  static constexpr int most_blocks = WEIGHTED ? 2 : 4;                              // more do not fit the registers
  static constexpr int blocks = 8 / words < most_blocks ? 8 / words : most_blocks;  // of a step: up to 64 bytes of x

  static __device__ __forceinline__ int feature(int group, int i) {
    return i / chunk * 8 * chunk + group * chunk + i % chunk;
  }
};

// The row's count, for a mean.
template <typename P>
__device__ __forceinline__ float divisor_of(const P& p, int64_t row) {
  if (!p.mean) return 1;
  const auto degree = __ldg(p.indptr + row + 1) - __ldg(p.indptr + row);
  return degree > 1 ? static_cast<float>(degree) : 1.f;
}

// 0 or a value's bits.
template <typename T>
__device__ __forceinline__ uint32_t bits_at(const T* from, bool present) {
  if (!present) return 0;
  if constexpr (sizeof(T) == 4) {
    return __ldg(reinterpret_cast<const uint32_t*>(from));
  } else {
    Pack<T, 1> one;
    load(from, one);
    return one.raw;
  }
}

template <typename T>
constexpr uint32_t kOne = std::is_same_v<T, float>    ? 0x3F800000u
                          : std::is_same_v<T, __half> ? 0x3C00u
                                                      : 0x3F80u;

template <typename T, typename I, int V, bool WEIGHTED, bool FAST>
__global__ void __launch_bounds__(TileConfig::max_threads, 2) windows_kernel(const Params<T, I> p) {
  using S = Shape<T, V, WEIGHTED>;
  constexpr int tiles = V / 2, B = S::blocks;
  constexpr bool narrow_types = sizeof(T) == 2, exact = !narrow_types && !FAST;
  extern __shared__ float shared[];
  const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
  const Share<I, B> share(p.windows);
  const Span<I>& span = share.span;
  const int team = p.windows.team;
  if (!span.present && team == 1) return;  // a whole warp
  const int first = blockIdx.y * 8 * V;    // feature of the slice

  int offset[S::words / S::chunk_words];  // features past the last one are not written
#pragma unroll
  for (int i = 0; i < V; i += S::chunk) {
    const int d = first + S::feature(group, i);
    offset[i / S::chunk] = d < p.num_feats ? d : 0;
  }

  float sum[halves][tiles][4] = {};
  float part[exact ? halves : 1][exact ? tiles : 1][4] = {};
  // What a step needs is asked for one step ahead, two ahead what says where that is, and three ahead, for weights,
  // what says where it is among the edges.
  uint64_t word[halves][B];
  I start[B];
  I column[B][2], edge[B][halves][2];
  uint32_t row_bits[B][halves];  // without weights: columns of the row `group` of each half
  uint32_t next_x[B][2][S::words], next_bits[B][halves], next_weight[B][halves][2];
  auto find_edges = [&](I block) {
#pragma unroll
    for (int b = 0; b < B; ++b) {
      const bool present = block + b < span.end;
#pragma unroll
      for (int h = 0; h < halves; ++h) {
        word[h][b] = present ? __ldg(p.windows.bits + static_cast<int64_t>(block + b) * halves + h) : 0;
      }
      start[b] = present ? __ldg(p.windows.block_ptr + block + b) : I{0};
    }
  };
  auto find = [&](I block) {
#pragma unroll
    for (int b = 0; b < B; ++b) {
      const bool present = block + b < span.end;
      const int64_t at = block + b;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const I source = present ? __ldg(p.windows.columns + at * width + 4 * c + member) : I{0};
        column[b][c] = source < 0 ? I{0} : source;  // a row of x that no bit asks for
      }
#pragma unroll
      for (int h = 0; h < halves; ++h) {
        if constexpr (WEIGHTED) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int bit = 8 * group + 4 * c + member;
            const int64_t own = start[b] + __popcll(word[h][b] & ((uint64_t{1} << bit) - 1));
            edge[b][h][c] = word[h][b] >> bit & 1 ? __ldg(p.windows.edges + own) : I{-1};
          }
          start[b] += __popcll(word[h][b]);
        } else {
          const uint8_t* bytes = reinterpret_cast<const uint8_t*>(p.windows.bits);
          row_bits[b][h] = present ? __ldg(bytes + at * (8 * halves) + 8 * h + group) : 0;
        }
      }
    }
  };
  auto gather = [&](I from, uint32_t (&to)[S::words]) {
#pragma unroll
    for (int w = 0; w < S::words; w += S::chunk_words) {
      load_words<S::chunk_words>(row_address(p.x, from, p.num_feats) + offset[w / S::chunk_words], to + w);
    }
  };
  auto fetch = [&]() {
#pragma unroll
    for (int b = 0; b < B; ++b) {
#pragma unroll
      for (int c = 0; c < 2; ++c) gather(column[b][c], next_x[b][c]);
#pragma unroll
      for (int h = 0; h < halves; ++h) {
        if (!WEIGHTED) next_bits[b][h] = row_bits[b][h];
#pragma unroll
        for (int c = 0; WEIGHTED && c < 2; ++c) {
          const I own = edge[b][h][c];
          next_weight[b][h][c] = bits_at(p.weight + own, own >= 0);
        }
      }
    }
  };

  const I stride = share.stride;
  I block = share.first;
  if (block < span.end) {  // else x may have no row
    if (WEIGHTED) find_edges(block);
    find(block);
    fetch();
    if (WEIGHTED) find_edges(block + stride);
    find(block + stride);
    if (WEIGHTED) find_edges(block + 2 * stride);
  }
  int steps = 0;
#pragma unroll 1
  for (; block < span.end; block += stride) {
    uint32_t x[B][2][S::words], narrow[B][halves][2];
#pragma unroll
    for (int b = 0; b < B; ++b) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int w = 0; w < S::words; ++w) x[b][c][w] = next_x[b][c][w];
#pragma unroll
        for (int h = 0; h < halves; ++h) {
          narrow[b][h][c] = WEIGHTED ? next_weight[b][h][c] : next_bits[b][h] >> (4 * c + member) & 1u ? kOne<T> : 0u;
        }
      }
    }
    fetch();
    find(block + 2 * stride);
    if (WEIGHTED) find_edges(block + 3 * stride);
    if constexpr (narrow_types) {
#pragma unroll
      for (int b = 0; b < B; b += 2) {
        uint32_t pairs[halves][2];
#pragma unroll
        for (int h = 0; h < halves; ++h) {
#pragma unroll
          for (int i = 0; i < 2; ++i) pairs[h][i] = narrow[b + i][h][0] | narrow[b + i][h][1] << 16;
        }
#pragma unroll
        for (int j = 0; j < tiles; ++j) {
          uint32_t wide[4];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            wide[2 * i] = __byte_perm(x[b + i][0][j], x[b + i][1][j], 0x5410);
            wide[2 * i + 1] = __byte_perm(x[b + i][0][j], x[b + i][1][j], 0x7632);
          }
#pragma unroll
          for (int h = 0; h < halves; ++h) multiply_add_16<T>(sum[h][j], wide, pairs[h][0], pairs[h][1]);
        }
      }
    } else {
#pragma unroll
      for (int b = 0; b < B; ++b) {
        uint32_t rest[halves][2];
#pragma unroll
        for (int h = 0; h < halves; ++h) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float value = __uint_as_float(narrow[b][h][c]);
            if (FAST) {
              narrow[b][h][c] = to_tf32(value);
            } else {
              split(value, narrow[b][h][c], rest[h][c]);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < tiles; ++j) {
          uint32_t high[4], low[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float value = __uint_as_float(x[b][i / 2][2 * j + i % 2]);
            if (FAST) {
              high[i] = to_tf32(value);
            } else {
              split(value, high[i], low[i]);
            }
          }
#pragma unroll
          for (int h = 0; h < halves; ++h) {
            float (&to)[4] = exact ? part[exact ? h : 0][exact ? j : 0] : sum[h][j];
            multiply_add(to, high, narrow[b][h][0], narrow[b][h][1]);
            if (exact) multiply_add(to, low, narrow[b][h][0], narrow[b][h][1]);
            if (exact && WEIGHTED) multiply_add(to, high, rest[h][0], rest[h][1]);
          }
        }
      }
      if (exact && (++steps % (kPromote / B) == 0 || block + stride >= span.end)) {
#pragma unroll
        for (int h = 0; h < halves; ++h) {
#pragma unroll
          for (int j = 0; j < tiles; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float& from = part[exact ? h : 0][exact ? j : 0][i];
              sum[h][j][i] += from;
              from = 0;
            }
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
    for (I step = share.first; step < span.end; step += stride) {
#pragma unroll 1
      for (I own = step; own < step + B && own < span.end; ++own) {
        int64_t at = __ldg(p.windows.block_ptr + own);
#pragma unroll 1
        for (int bit = 0; bit < 64 * halves; ++bit) {
          const int h = bit / 64, row = bit % 64 / width;
          if (!(__ldg(p.windows.bits + static_cast<int64_t>(own) * halves + h) >> (bit % 64) & 1)) continue;
          const I nonzero = __ldg(p.windows.edges + at++);
          if (row / 2 != member) continue;
          const float factor = WEIGHTED ? load_one(p.weight + nonzero) : 1.f;
          uint32_t words[S::words];
          gather(__ldg(p.windows.columns + static_cast<int64_t>(own) * width + bit % width), words);
#pragma unroll
          for (int half = 0; half < halves; ++half) {
#pragma unroll
            for (int i = 0; i < V; ++i) {
              T value;
              if constexpr (narrow_types) {
                Pack<T, 2> two;
                two.raw = words[i / 2];
                value = two.values[i % 2];
              } else {
                value = __uint_as_float(words[i]);
              }
              float* to = sum[half][i / 2] + 2 * (i % 2);
              if (half == h && row % 2) to[1] += factor * widen(value);
              if (half == h && row % 2 == 0) to[0] += factor * widen(value);
            }
          }
        }
      }
    }
  }

  // Lane's values of one of its four rows, row 2 * member + r of half h: pair 2 * h + r.
  constexpr int pairs = 2 * halves;
  auto write = [&](int pair, const float (&values)[V]) {
    const int inside = 8 * (pair / 2) + 2 * member + pair % 2;
    const int64_t row = static_cast<int64_t>(span.row) * height + inside;
    if (row >= p.num_rows) return;
    const bool whole = span.part < 0;
    const float divisor = whole ? divisor_of(p, row) : 1.f;
    const int64_t at = whole ? row : span.part * height + inside;
#pragma unroll
    for (int i = 0; i < V; i += S::chunk) {
      const int d = first + S::feature(group, i);
      if (d >= p.num_feats) continue;
      if (whole) {
        Pack<T, S::chunk> packed;
#pragma unroll
        for (int j = 0; j < S::chunk; ++j) packed.values[j] = narrow<T>(values[i + j] / divisor);
        store(p.out + at * p.num_feats + d, packed);
      } else {
#pragma unroll
        for (int j = 0; j < S::chunk; ++j) p.parts[at * p.num_feats + d + j] = values[i + j];
      }
    }
  };
  float values[V];
  float* mine = shared + static_cast<int64_t>(threadIdx.x / 32) * (pairs * V * 32) + lane;
#pragma unroll
  for (int pair = 0; pair < pairs; ++pair) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      values[i] = sum[pair / 2][i / 2][2 * (i % 2) + pair % 2];
      if (team > 1) mine[(pair * V + i) * 32] = values[i];
    }
    if (team == 1) write(pair, values);
  }
  if (team == 1) return;
  __syncthreads();
  if (!span.present) return;
#pragma unroll 1
  for (int pair = share.member; pair < pairs; pair += team) {
    const float* from = mine - share.member * (pairs * V * 32) + pair * V * 32;
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = from[i * 32];
#pragma unroll 1
    for (int other = 1; other < team; ++other) {
#pragma unroll
      for (int i = 0; i < V; ++i) values[i] += from[(other * pairs * V + i) * 32];
    }
    write(pair, values);
  }
}

// Windows in pieces, a block each: that of a chunk in which such a window begins, see pieces_of. (merge_pieces of
// pieces.cuh would look for it once for every 32 of the height * num_feats values.)
template <typename T, typename I>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const Params<T, I> p) {
  const Pieces<I> pieces = pieces_of(p.windows.rows, blockIdx.x);
  const int64_t size = static_cast<int64_t>(height) * p.num_feats;
  for (int64_t at = threadIdx.x; pieces.count && at < size; at += kMergeThreads) {
    const int64_t row = pieces.row * height + at / p.num_feats;
    if (row >= p.num_rows) continue;
    double sum = 0;
    for (int64_t j = 0; j < pieces.count; ++j) sum += p.parts[pieces[j] * size + at];
    p.out[row * p.num_feats + at % p.num_feats] = narrow<T>(static_cast<float>(sum) / divisor_of(p, row));
  }
}

template <int V, typename T, typename I>
cudaError_t launch(const Params<T, I>& p, bool fast, cudaStream_t stream) {
  const dim3 grid(p.windows.blocks(), static_cast<unsigned>(ceil_div(p.num_feats, 8 * V)));
  const int threads = p.windows.threads();
  const int bytes = p.windows.team > 1 ? threads * 2 * halves * V * static_cast<int>(sizeof(float)) : 0;
  auto run = [&](auto weighted, auto rounded) {
    windows_kernel<T, I, V, weighted, rounded><<<grid, threads, bytes, stream>>>(p);
    return cudaGetLastError();
  };
  using std::false_type;
  using std::true_type;
  if constexpr (sizeof(T) == 4) {
    if (fast) return p.weight ? run(true_type{}, true_type{}) : run(false_type{}, true_type{});
  }
  return p.weight ? run(true_type{}, false_type{}) : run(false_type{}, false_type{});
}

template <typename T, typename I>
cudaError_t run(const Csr& graph, const Tiles& tiles, const void* x, const void* weight, void* out, int64_t num_feats,
                bool mean, bool fast, void* scratch, cudaStream_t stream) {
  Params<T, I> p{};
  p.windows = windows_of<I>(graph, tiles);
  p.indptr = static_cast<const I*>(graph.indptr);
  p.x = static_cast<const T*>(x);
  p.weight = static_cast<const T*>(weight);
  p.out = static_cast<T*>(out);
  p.parts = static_cast<float*>(scratch);
  p.num_rows = graph.num_rows;
  p.num_feats = static_cast<int>(num_feats);
  p.mean = mean;
  const cudaError_t status = num_feats <= 16   ? launch<2>(p, fast, stream)
                             : num_feats <= 32 ? launch<4>(p, fast, stream)
                                               : launch<8>(p, fast, stream);
  if (status != cudaSuccess || p.windows.rows.num_splits == 0) return status;
  merge_kernel<T, I><<<static_cast<unsigned>(p.windows.rows.num_splits), kMergeThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t spmm_tiled(Workspace& workspace, const Csr& graph, const Tiles& tiles, const void* x, const void* weight,
                       void* out, int64_t num_feats, bool mean, bool fast, DType dtype, cudaStream_t stream) {
  if (graph.num_rows == 0 || num_feats == 0) return cudaSuccess;
  if (!fits_kernels(tiles) || num_feats % (16 / size_of(dtype))) return cudaErrorInvalidValue;
  const int64_t parts = windows_of<int32_t>(graph, tiles).rows.num_parts;
  void* const scratch = workspace.take(parts * height * num_feats * static_cast<int64_t>(sizeof(float)));
  return with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    if constexpr (std::is_same_v<T, double>) {
      return cudaErrorInvalidValue;
    } else {
      return run<T, I>(graph, tiles, x, weight, out, num_feats, mean, fast, scratch, stream);
    }
  });
}

}  // namespace cuda
}  // namespace gnnaccel
