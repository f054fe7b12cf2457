// What the kernels of compressed rows (types.h: Compressed) share: workers of eight lanes, a dense row in shared memory
// that the lanes of a worker reach by feature, and the walk over a worker's nonzeros.
//
// A row of num_feats features lies in eight columns of `height` features each. The four workers of a warp stand beside
// each other, so that a worker has eight banks of its own. Places ascend in a row, and a lane takes k / 8 of them in
// turn: the lane's features lie in or near the column of its number, and few lanes meet in a bank. k = 32 of 256: 2.1
// wavefronts for the 32 entries of an edge, where features counted through the banks would take 3.5.
#pragma once

#include "rows.cuh"

namespace gnnaccel {
namespace cuda {

constexpr int kLanes = 8;                // of a worker
constexpr int kCompressedThreads = 256;  // at most, of a block
constexpr int64_t kSharedBytes = 65536;  // for the dense rows of a block of more than one warp
constexpr int64_t kWarpBytes = 131072;   // most that a warp may have

// Where feature f of a worker's dense row lies, in elements of A from `base`.
template <typename A>
struct DenseRow {
  A* base;
  uint32_t low;  // height - 1, a power of two less one
  int shift;     // log2 of the height

  __device__ __forceinline__ A& operator[](uint32_t f) const { return base[(f & low) * 32 + (f >> shift)]; }
  // Feature r of a lane's column.
  __device__ __forceinline__ A& at(int column, int r) const { return base[r * 32 + column]; }
};

struct Columns {
  int height;  // features in each of the eight
  int shift;
};

inline Columns columns_of(int64_t num_feats) {
  Columns columns{1, 0};
  while (columns.height * kLanes < num_feats) columns.height *= 2, ++columns.shift;
  return columns;
}

// Threads of a block, and its bytes of shared memory: as many warps as kSharedBytes hold, at least one. 0 threads: a
// row does not fit.
struct Block {
  int threads;
  int64_t shared_bytes;
};

inline Block block_of(Columns columns, int64_t element_bytes) {
  const int64_t warp_bytes = columns.height * 32 * element_bytes;
  if (warp_bytes > kWarpBytes) return {0, 0};
  int warps = kCompressedThreads / 32;
  while (warps > 1 && warps * warp_bytes > kSharedBytes) warps /= 2;
  return {warps * 32, warps * warp_bytes};
}

template <typename A>
__device__ __forceinline__ DenseRow<A> dense_row_of(void* shared, Columns columns) {
  const int warp = threadIdx.x / 32, worker = threadIdx.x % 32 / kLanes;
  A* base = static_cast<A*>(shared) + warp * columns.height * 32 + worker * kLanes;
  return {base, static_cast<uint32_t>(columns.height) - 1, columns.shift};
}

// Calls f(feature, column, r) for the four features from `feature` on, which are at(column, r .. r + 3); all features
// of a row that has whole fours of them, and a height of eight or more. Two lanes share a sector of 32 bytes.
template <typename F>
__device__ __forceinline__ void for_fours(Columns columns, int num_feats, F f) {
  const int lane = threadIdx.x % kLanes;
  for (int first = 0; first < columns.height; first += 8) {
    const int r = first + 4 * (lane & 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = (lane & ~1) + half, feature = column * columns.height + r;
      if (feature < num_feats) f(feature, column, r);
    }
  }
}

// The same one by one, for any row.
template <typename F>
__device__ __forceinline__ void for_each_feature(Columns columns, int num_feats, F f) {
  const int column = threadIdx.x % kLanes;
  for (int r = 0; r < columns.height; ++r) {
    const int feature = column * columns.height + r;
    if (feature < num_feats) f(feature, column, r);
  }
}

// How a lane reads its k / 8 entries of a compressed row: LOADS times VECTOR at once, or (LOADS 0) as many times as it
// takes, one edge after the other.
template <int VECTOR, int LOADS>
struct Shape {
  static constexpr int vector = VECTOR;
  static constexpr int loads = LOADS;
  static constexpr int held = VECTOR * LOADS;
  static constexpr int batch = held == 0 ? 1 : held >= 8 ? 2 : held >= 4 ? 4 : 8;  // edges in flight
};

// Calls f(Shape) for k entries to a row. 64-bit values are read one by one: they are for checking. 64-bit indices, of
// graphs that few GPUs hold, have no shapes of their own for the usual k.
template <typename T, typename I, typename F>
cudaError_t with_shape(int64_t k, F f) {
  if constexpr (sizeof(T) <= 4 && sizeof(I) == 4) {
    if (k == 8) return f(Shape<1, 1>{});
    if (k == 16) return f(Shape<2, 1>{});
    if (k == 32) return f(Shape<4, 1>{});
    if (k == 64) return f(Shape<4, 2>{});
  }
  if constexpr (sizeof(T) <= 4) {
    if (k % 32 == 0) return f(Shape<4, 0>{});
  }
  return f(Shape<1, 0>{});
}

// Calls f(P{}) with the type of places.
template <typename F>
cudaError_t with_places(int64_t num_feats, F f) {
  return num_feats <= 256 ? f(uint8_t{}) : f(uint16_t{});
}

// Source of a lane's nonzero of those from `from` on.
template <typename I>
__device__ __forceinline__ I source_at(const Span<I>& span, const I* indices, I from) {
  const int lane = threadIdx.x % kLanes;
  return lane < span.end - from ? __ldg(indices + from + lane) : I{0};
}

// The nonzeros of a worker, eight at a time: lane i holds source and weight of the i-th. Calls take(full, first,
// source, weight, left) for every BATCH of them; `full`: for all workers of the warp all are there, else those before
// `left` are. `ahead`: source_at the span's begin, which the caller may ask for early.
template <int BATCH, bool WEIGHTED, typename T, typename I, typename F>
__device__ __forceinline__ void walk(const Span<I>& span, I ahead, const I* indices, const I* edge_ids,
                                     const T* weights, F take) {
  static_assert(kPieceRun % kLanes == 0 && kLanes % BATCH == 0, "a tile lies in one run of its piece");
  const int lane = threadIdx.x % kLanes;
  I k = span.begin;
#pragma unroll 1
  while (__any_sync(~0u, k < span.end)) {
    const I source = ahead, left = span.end - k;
    Acc<T> weight = 1;
    if constexpr (WEIGHTED) {
      if (lane < left) {
        const I at = k + lane;
        weight = load_one(weights + (edge_ids ? __ldg(edge_ids + at) : at));
      }
    }
    const I next = (k + kLanes - span.begin) % kPieceRun ? I{kLanes} : kLanes + span.skip;
    k = left > next ? k + next : span.end;
    ahead = source_at(span, indices, k);
    if (__all_sync(~0u, left >= kLanes)) {
#pragma unroll
      for (int first = 0; first < kLanes; first += BATCH) take(std::true_type{}, first, source, weight, left);
    } else {
#pragma unroll 1
      for (int first = 0; first < kLanes && __any_sync(~0u, first < left); first += BATCH) {
        take(std::false_type{}, first, source, weight, left);
      }
    }
  }
}

}  // namespace cuda
}  // namespace gnnaccel
