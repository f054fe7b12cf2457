// What the SpMM kernels over a work list share: the walk of a worker over its nonzeros, and how parts of rows become
// rows.
#pragma once

#include "spmm.cuh"

namespace gnnaccel {
namespace cuda {

// Gathers of a lane in flight. Twice as many would halve the workers in step, which cost more than they gain but for
// the narrowest slices. A maximum keeps its position beside each value, and has no registers for that.
template <int L, bool EXTREME>
constexpr int batch_of = L == 4 && !EXTREME ? 8 : 4;

// Registers are held to what lets this many blocks share a multiprocessor: workers in step are what L1 lives on.
// A third block would take 32 to 92 bytes of local memory from each thread of a maximum.
// Values that lie apart take an address and a branch each, and more registers.
template <typename T, typename I, int L, Weight WEIGHT, bool EXTREME, bool SPREAD = false>
constexpr int min_blocks = SPREAD ? (sizeof(I) == 8 || sizeof(T) == 8 ? 1 : 2)
                           : L > 4 && sizeof(T) == 4 && sizeof(I) == 4 && WEIGHT != Weight::heads && !EXTREME ? 3
                                                                                                              : 2;

// Of the nonzeros that max and min take, which take a register for each feature: 64-bit ones would leave local memory
// for the rest. spmm.cu sends graphs of more nonzeros to spmm_general.
using Position = int32_t;

template <typename T, typename I>
struct ListParams {
  const Item<I>* items;
  const I* steps;
  int64_t num_items;
  const I* indices;
  const I* edge_ids;
  SourceScale<T, I> source_scale;
  Operand lhs;
  Operand rhs;
  T* out;
  I* arg_lhs;
  I* arg_rhs;
  Parts<T, Position> parts;
  int64_t num_feats;
  bool ragged;  // rows of out are no whole number of vectors, though those of the sources are
  bool mean;
  Acc<T> sign;
  double empty_value;
  Epilogue<T> epilogue;
};

// What a lane has of a row: 16 bytes of values, SPREAD over features L apart.
template <typename T, int L, bool EXTREME, bool SPREAD>
using LaneResult = Result<T, Position, 16 / sizeof(T), EXTREME, SPREAD ? L : 1>;

// What a group of L lanes adds up of nonzeros begin .. end - 1 of one row, for the lane's features from d on; with RUNS
// in runs of kPieceRun, `skip` nonzeros of the row's other pieces between them. All lanes of a warp call it together.
template <int L, Weight WEIGHT, bool EXTREME, bool RUNS, bool SPREAD, typename T, typename I>
__device__ __forceinline__ LaneResult<T, L, EXTREME, SPREAD> walk(const ListParams<T, I>& p, I begin, I end, I skip,
                                                                  int lane, int64_t d) {
  constexpr int N = 16 / sizeof(T);
  constexpr int batch = batch_of<L, EXTREME>;
  constexpr int tile = L < batch ? batch : L;  // nonzeros whose indices the lanes hold
  constexpr int held = tile / L;
  static_assert(!RUNS || kPieceRun % tile == 0, "a tile lies in one run of its piece");
  static_assert(held == 1 ? tile % batch == 0 : tile == batch, "lanes hold a whole number of batches");
  Reader<T, N> lhs(p.lhs, SPREAD ? 0 : d);
  const Reader<T, 1> rhs(p.rhs, SPREAD ? 0 : d);
  lhs.wide = true;  // said to the compiler, which then keeps no registers for the other case
  const T* features = static_cast<const T*>(p.lhs.data) + d;
  const int beyond = lhs.len - static_cast<int>(d);
  auto fetch = [&](I from, Pack<T, N>& to) {
    if constexpr (!SPREAD) return lhs.fetch(from, to);
    const T* row = row_address(features, from, lhs.len);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i * L >= beyond) continue;
      Pack<T, 1> one;
      load(row + i * L, one);
      to.values[i] = one.values[0];
    }
  };
  LaneResult<T, L, EXTREME, SPREAD> result;
  result.clear(static_cast<Position>(begin));
  I k = begin;
  I source[held];
  auto load_sources = [&](I first) {
#pragma unroll
    for (int h = 0; h < held; ++h) {
      const I left = end - first - h * L;
      source[h] = lane < left ? __ldg(p.indices + first + h * L + lane) : I{0};
    }
  };
  load_sources(k);
#pragma unroll 1
  while (__any_sync(~0u, k < end)) {
    I col[held], edge[held];
    Acc<T> weight[held];
    const I left = end - k;
#pragma unroll
    for (int h = 0; h < held; ++h) {
      col[h] = source[h];
      if constexpr (WEIGHT != Weight::none) {
        const bool inside = lane < left - h * L;
        edge[h] = k + h * L + lane;
        if (p.edge_ids && inside) edge[h] = __ldg(p.edge_ids + edge[h]);
        if constexpr (one_for_all_features<WEIGHT>) {
          weight[h] = inside ? scale_of<T, WEIGHT>(p, col[h], edge[h]) : Acc<T>(0);
          if constexpr (EXTREME) weight[h] *= p.sign;
        }
      }
    }
    const I tile_begin = k;
    const I next = RUNS && (k + tile - begin) % kPieceRun == 0 ? tile + skip : tile;
    k = left > next ? k + next : end;
    load_sources(k);
    // Takes nonzeros first .. first + batch - 1 of the tile, or (not FULL) those of them that are there.
    auto take = [&](auto full, int first) {
      constexpr bool FULL = decltype(full)::value;
      Pack<T, N> x[batch];
      Pack<T, 1> own[batch];
#pragma unroll
      for (int u = 0; u < batch; ++u) {
        const int j = first + u;
        if (!FULL) x[u].raw = {}, own[u].raw = {};
        const I from = __shfl_sync(~0u, col[u / L], j % L, L);
        if (FULL || j < left) fetch(from, x[u]);
        if constexpr (WEIGHT == Weight::heads) {
          const I id = __shfl_sync(~0u, edge[u / L], j % L, L);
          if (FULL || j < left) rhs.fetch(id, own[u]);
        }
      }
#pragma unroll
      for (int u = 0; u < batch; ++u) {
        if constexpr (WEIGHT == Weight::none && !EXTREME) {
          result.add(x[u]);
        } else {
          Acc<T> scale = EXTREME ? p.sign : Acc<T>(1);
          if constexpr (one_for_all_features<WEIGHT>) scale = __shfl_sync(~0u, weight[u / L], (first + u) % L, L);
          if constexpr (WEIGHT == Weight::heads) scale *= widen(own[u].values[0]);
          if constexpr (!EXTREME) {
            result.add(scale, x[u]);
          } else if (FULL || first + u < left) {
            result.add(scale, x[u], static_cast<Position>(tile_begin + first + u));
          }
        }
      }
    };
    if (__all_sync(~0u, left >= tile)) {
#pragma unroll
      for (int first = 0; first < tile; first += batch) take(std::true_type{}, first);
    } else {
#pragma unroll 1
      for (int first = 0; first < tile && __any_sync(~0u, first < left); first += batch) take(std::false_type{}, first);
    }
  }
  return result;
}

constexpr int kCombineThreads = 256;
constexpr int kWarpParts = 64;  // a row of more parts is combined by a whole block

// A warp combines the parts of one long row, in order, for 32 features (blockIdx.y); a row of many parts is left to all
// warps of the block together, each taking every eighth part.
template <typename T, typename I, bool EXTREME>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const ListParams<T, I> p, const Item<I>* splits, int64_t num_splits) {
  constexpr int warps = kCombineThreads / 32;
  const int warp = threadIdx.x / 32;
  const int64_t d = static_cast<int64_t>(blockIdx.y) * 32 + threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * warps;
  // Of a split: row, its first part, their number, its degree.
  auto read = [&](const Item<I>& split, I from, I step) {
    Combined<T, Position, EXTREME> row;
    auto place = [&](I part) { return static_cast<int64_t>(split.begin + part) * p.num_feats + d; };
    if (d < p.num_feats) row.read(p.parts, from, split.end, step, place);
    return row;
  };
  if (first + warp < num_splits && d < p.num_feats) {
    const Item<I> own = load_item(splits + first + warp);
    if (own.end <= kWarpParts) read(own, 0, 1).write(p, own.row, d, own.part);
  }
  for (int64_t i = first; i < first + warps && i < num_splits; ++i) {
    const Item<I> split = load_item(splits + i);
    if (split.end <= kWarpParts) continue;
    auto row = read(split, warp, warps);
    row.template merge_warps<warps>();
    if (warp == 0 && d < p.num_feats) row.write(p, split.row, d, split.part);
  }
}

// Of the parts that a call along `work` has left, if any.
template <bool EXTREME, typename T, typename I>
cudaError_t combine(const ListParams<T, I>& p, const WorkList& work, cudaStream_t stream) {
  if (work.num_splits == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(work.num_splits, kCombineThreads / 32)),
                  static_cast<unsigned>(ceil_div(p.num_feats, 32)));
  const Item<I>* splits = static_cast<const Item<I>*>(work.splits);
  combine_kernel<T, I, EXTREME><<<grid, kCombineThreads, 0, stream>>>(p, splits, work.num_splits);
  return cudaGetLastError();
}

template <typename T, typename I>
ListParams<T, I> list_params_of(const SpmmCall& call) {
  ListParams<T, I> p{};
  p.items = static_cast<const Item<I>*>(call.work.items);
  p.steps = static_cast<const I*>(call.work.steps);
  p.num_items = call.work.num_items;
  p.indices = static_cast<const I*>(call.graph.indices);
  p.edge_ids = static_cast<const I*>(call.graph.edge_ids);
  p.source_scale = SourceScale<T, I>::of(call.fused);
  p.epilogue = Epilogue<T>::of(call.fused);
  p.lhs = call.lhs;
  p.rhs = call.rhs;
  p.out = static_cast<T*>(call.out);
  p.arg_lhs = static_cast<I*>(call.arg_lhs);
  p.arg_rhs = static_cast<I*>(call.arg_rhs);
  p.num_feats = call.num_feats;
  p.ragged = call.ragged();
  p.parts.values = static_cast<Acc<T>*>(call.workspace);
  p.parts.where = reinterpret_cast<Position*>(p.parts.values + call.work.num_parts * p.num_feats);
  p.mean = call.reduce == Reduce::mean;
  p.sign = call.reduce == Reduce::min ? -1 : 1;
  p.empty_value = call.empty_value;
  return p;
}

}  // namespace cuda
}  // namespace gnnaccel
