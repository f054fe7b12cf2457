// Inner products of the two ends of each edge on tensor cores, by tiles of a translated graph (cpp/types.h: Tiles;
// TC-GNN, algorithm 3).
//
// A warp takes two blocks of a window at a time (tiles.cuh): the rows of y that the window stands for are the wide
// operand of the matrix instruction, the rows of x that 8 columns stand for its narrow one. A gathered row of x serves
// 16 rows; those of y come from L1 again and again. Features may be summed up in any order, so a lane takes 16 bytes of
// neighbouring ones. Of the 16 x 8 sums those that are edges are written, which the bitmap tells.
//
// Accurate to float32 by splitting both operands as spmm_tiled.cu does; products of 16-bit types are exact. A sum that
// is not finite is computed again by one lane: the rests of what is infinite are not numbers.
#include "tiles.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

constexpr int halves = TileConfig::halves, width = TileConfig::width, height = TileConfig::height;
constexpr int kBlocks = 2;     // of a step
constexpr int kPromote = 128;  // features summed up by the instruction alone

template <typename T, typename I>
struct Params {
  Windows<I> windows;
  const T* x;  // [num_cols, num_heads, len]
  const T* y;  // [num_rows, num_heads, len]
  T* out;      // [nnz, num_heads]
  int64_t num_rows;
  int num_heads;
  int len;
};

template <typename T, typename I, bool FAST>
__global__ void __launch_bounds__(TileConfig::max_threads, 2) dot_kernel(const Params<T, I> p) {
  constexpr bool exact = sizeof(T) == 4 && !FAST;
  constexpr int chunk = 16 / sizeof(T), words = 4, lanes_feats = 4 * chunk;
  const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
  const Share<I, kBlocks> share(p.windows);
  const Span<I>& span = share.span;
  if (!span.present) return;  // a whole warp
  const int head = blockIdx.y, row_len = p.num_heads * p.len;
  const int64_t first_row = static_cast<int64_t>(span.row) * height;
  const T *x = p.x + head * p.len, *y[halves];
#pragma unroll
  for (int h = 0; h < halves; ++h) {  // what rows past the last one give is not written
    const int64_t row = first_row + 8 * h + group;
    y[h] = p.y + head * p.len + (row < p.num_rows ? row : p.num_rows - 1) * row_len;
  }

  // Of the step to come.
  I column[kBlocks], start[kBlocks];  // the lane's; the block's first nonzero
  uint64_t word[kBlocks][halves];
  auto find = [&](I block) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const bool present = block + b < span.end;
      const int64_t at = block + b;
      const I source = present ? __ldg(p.windows.columns + at * width + group) : I{0};
      column[b] = source < 0 ? I{0} : source;  // a row of x that no bit asks for
      start[b] = present ? __ldg(p.windows.block_ptr + at) : I{0};
#pragma unroll
      for (int h = 0; h < halves; ++h) word[b][h] = present ? __ldg(p.windows.bits + at * halves + h) : 0;
    }
  };
  I block = share.first;
  find(block);
#pragma unroll 1
  for (; block < span.end; block += share.stride) {
    const T* from[kBlocks];
    I own[kBlocks], edge[kBlocks][4];  // edge[b][2 * h + c]: row `group` of half h, column 2 * member + c; or -1
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      own[b] = column[b];
      from[b] = row_address(x, column[b], row_len);
      int64_t at = start[b];
#pragma unroll
      for (int h = 0; h < halves; ++h) {
        const int bit = 8 * group + 2 * member;
        const uint32_t two = static_cast<uint32_t>(word[b][h] >> bit);
        const int64_t first = at + __popcll(word[b][h] & ((uint64_t{1} << bit) - 1));
        edge[b][2 * h] = two & 1 ? __ldg(p.windows.edges + first) : I{-1};
        edge[b][2 * h + 1] = two & 2 ? __ldg(p.windows.edges + first + (two & 1)) : I{-1};
        at += __popcll(word[b][h]);
      }
    }
    find(block + share.stride);
    float sum[kBlocks][4] = {}, part[kBlocks][4] = {};
    auto add = [&](int d, bool inside) {
      uint32_t wide[halves][words], narrow[kBlocks][words];
#pragma unroll
      for (int h = 0; h < halves; ++h) load_words<words>(y[h] + d, wide[h]);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) load_words<words>(from[b] + d, narrow[b]);
#pragma unroll
      for (int w = 0; w < words; w += 2) {
        uint32_t a[4], a_low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[i] = inside ? wide[i % 2][w + i / 2] : 0;
          if constexpr (exact) split(__uint_as_float(a[i]), a[i], a_low[i]);
          if constexpr (FAST) a[i] = to_tf32(__uint_as_float(a[i]));
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          uint32_t high[2], low[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            high[i] = inside ? narrow[b][w + i] : 0;
            if constexpr (exact) split(__uint_as_float(high[i]), high[i], low[i]);
            if constexpr (FAST) high[i] = to_tf32(__uint_as_float(high[i]));
          }
          if constexpr (sizeof(T) == 2) {
            multiply_add_16<T>(sum[b], a, high[0], high[1]);
          } else {
            multiply_add(part[b], a, high[0], high[1]);
            if constexpr (exact) multiply_add(part[b], a, low[0], low[1]);
            if constexpr (exact) multiply_add(part[b], a_low, high[0], high[1]);
          }
        }
      }
    };
    auto promote = [&]() {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[b][i] += part[b][i];
          part[b][i] = 0;
        }
      }
    };
    int done = 0;
#pragma unroll 2
    for (; done + lanes_feats <= p.len; done += lanes_feats) {
      add(done + member * chunk, true);
      if (sizeof(T) == 4 && (done + lanes_feats) % kPromote == 0) promote();
    }
    if (done < p.len) {
      const bool inside = done + member * chunk < p.len;
      add(inside ? done + member * chunk : 0, inside);
    }
    if (sizeof(T) == 4) promote();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float value = sum[b][i];
        // Whose column the lane writes is another lane's.
        const I source = __shfl_sync(~0u, own[b], 4 * (2 * member + i % 2));
        if (edge[b][i] < 0) continue;
        if (!isfinite(value)) {
          const T* row = row_address(x, source, row_len);
          value = 0;
          for (int d = 0; d < p.len; ++d) value += load_one(row + d) * load_one(y[i / 2] + d);
        }
        p.out[static_cast<int64_t>(edge[b][i]) * p.num_heads + head] = narrow<T>(value);
      }
    }
  }
}

}  // namespace

cudaError_t sddmm_tiled(const Csr& graph, const Tiles& tiles, const void* x, const void* y, void* out,
                        int64_t num_heads, int64_t len, bool fast, DType dtype, cudaStream_t stream) {
  if (graph.nnz == 0 || num_heads == 0) return cudaSuccess;
  if (!fits_kernels(tiles) || len % (16 / size_of(dtype))) return cudaErrorInvalidValue;
  return with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    if constexpr (std::is_same_v<T, double>) {
      return cudaErrorInvalidValue;
    } else {
      Params<T, I> p{};
      p.windows = windows_of<I>(graph, tiles);
      p.x = static_cast<const T*>(x);
      p.y = static_cast<const T*>(y);
      p.out = static_cast<T*>(out);
      p.num_rows = graph.num_rows;
      p.num_heads = static_cast<int>(num_heads);
      p.len = static_cast<int>(len);
      const dim3 grid(p.windows.blocks(), static_cast<unsigned>(num_heads));
      const int threads = p.windows.threads();
      if (sizeof(T) == 4 && fast) {
        dot_kernel<T, I, sizeof(T) == 4><<<grid, threads, 0, stream>>>(p);
      } else {
        dot_kernel<T, I, false><<<grid, threads, 0, stream>>>(p);
      }
      return cudaGetLastError();
    }
  });
}

}  // namespace cuda
}  // namespace gnnaccel
