// SpMM by rows of a work list: out[row] = sum, mean, max or min over the row's nonzeros of weight * x[source].
//
// A worker is a group of 4 to 32 lanes, 16 bytes of features each. It takes one item of the work list (a row, or
// one of the interleaved pieces of a long row, see WorkList) and keeps the row in registers; a lane loads the
// index and the weight of one nonzero, shuffles hand them round, and four gathers are in flight before the first
// use. Pieces go to the workspace and are combined in a fixed order by a second kernel, launched where there are any.
//
// The order of the list makes the caches work. Rows of equal length next to each other run through their sorted
// sources in step, so that the workers of a multiprocessor (and all of them in L2) want the same sources at about
// the same time; rows of one community share them besides. Slices of the features go one after the other
// (blockIdx.y), so that the slice's part of x has a chance to stay in L2. H200, reddit-like, 32 features: 1.40 ms by
// length, 1.17 by community and length (benchmarks/results/cuda_kernels_h200.csv); 1.66 as given, in a prototype.
//
// Sub-warp per row with 16-byte lanes: Sputnik (Gale et al., 2020); rows by length: GE-SpMM, RoDe; clusters:
// HP-SpMM (Fan et al.).
#include "spmm.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 256;    // of combine_kernel
  static constexpr int warp_parts = 64;  // a row of more parts is combined by a whole block
};

// Gathers of a lane in flight. Twice as many would halve the workers in step, which cost more than they gain but for
// the narrowest slices. A maximum keeps its position beside each value, and has no registers for that.
template <int L, bool EXTREME>
constexpr int batch_of = L == 4 && !EXTREME ? 8 : 4;

// Registers are held to what lets this many blocks share a multiprocessor: workers in step are what L1 lives on.
// A third block would take 32 to 92 bytes of local memory from each thread of a maximum.
template <typename T, typename I, int L, Weight WEIGHT, bool EXTREME>
constexpr int min_blocks = L > 4 && sizeof(T) == 4 && sizeof(I) == 4 && WEIGHT != Weight::heads && !EXTREME ? 3 : 2;

// Of the winners of max and min, which take a register for each feature: 64-bit ones would leave local memory for the
// rest. spmm.cu sends graphs of more nonzeros to spmm_general.
using Position = int32_t;

template <typename T, typename I>
struct Params {
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
  bool mean;
  Acc<T> sign;
  double empty_value;
  Epilogue<T> epilogue;
};

template <typename T, typename I, int L, Weight WEIGHT, bool EXTREME>
__global__ void __launch_bounds__(kMaxListThreads, min_blocks<T, I, L, WEIGHT, EXTREME>)
    rows_kernel(const Params<T, I> p) {
  constexpr int N = 16 / sizeof(T);
  constexpr int batch = batch_of<L, EXTREME>;
  constexpr int tile = L < batch ? batch : L;  // nonzeros whose indices the lanes hold
  constexpr int held = tile / L;
  static_assert(kPieceRun % tile == 0, "a tile lies in one run of its piece");
  static_assert(held == 1 ? tile % batch == 0 : tile == batch, "lanes hold a whole number of batches");
  const int lane = threadIdx.x % L;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (blockDim.x / L) + threadIdx.x / L;
  const int64_t feature = (static_cast<int64_t>(blockIdx.y) * L + lane) * N;
  const int64_t d = feature < p.num_feats ? feature : 0;  // lanes past the end repeat the first, and write nothing
  I begin = 0, end = 0, skip = 0;  // skip: nonzeros of the row's other pieces between two runs of this one
  if (i < p.num_items) {
    const Item<I> item = load_item(p.items + i);
    begin = item.begin;
    end = item.end;
    if (item.part) skip = __ldg(p.steps + item.part - 1) - kPieceRun;
  }
  Reader<T, N> lhs(p.lhs, d);
  const Reader<T, 1> rhs(p.rhs, d);
  lhs.wide = true;  // said to the compiler, which then keeps no registers for the other case
  Result<T, Position, N, EXTREME> result;
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
    const I next = (k + tile - begin) % kPieceRun ? tile : tile + skip;
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
        if (FULL || j < left) lhs.fetch(from, x[u]);
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
  if (i >= p.num_items || feature >= p.num_feats) return;
  const Item<I> item = load_item(p.items + i);  // again: it would have cost registers all the while
  if (item.part) {
    result.write_part(p.parts, static_cast<int64_t>(item.part - 1) * p.num_feats + d);
  } else {
    result.template write<WEIGHT == Weight::fused>(p, item.row, d, item.end - item.begin);
  }
}

// A warp combines the parts of one long row, in order, for 32 features (blockIdx.y); a row of many parts is left to all
// warps of the block together, each taking every eighth part.
template <typename T, typename I, bool EXTREME>
__global__ void __launch_bounds__(Config::threads)
    combine_kernel(const Params<T, I> p, const Item<I>* splits, int64_t num_splits) {
  constexpr int warps = Config::threads / 32;
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
    if (own.end <= Config::warp_parts) read(own, 0, 1).write(p, own.row, d, own.part);
  }
  for (int64_t i = first; i < first + warps && i < num_splits; ++i) {
    const Item<I> split = load_item(splits + i);
    if (split.end <= Config::warp_parts) continue;
    auto row = read(split, warp, warps);
    row.template merge_warps<warps>();
    if (warp == 0 && d < p.num_feats) row.write(p, split.row, d, split.part);
  }
}

// All kernels of a call, by whether it is a max or min.
template <typename T, typename I, bool EXTREME>
cudaError_t launch(const SpmmCall& call, Slice slice, const Params<T, I>& p, cudaStream_t stream) {
  const cudaError_t status = with_shape<16>(slice.lanes, weight_of(call), [&](auto lanes, auto weight) {
    const int threads = list_threads(call.graph);
    const int64_t blocks = ceil_div(p.num_items, threads / lanes);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(slice.slices));
    if constexpr (EXTREME && weight == Weight::fused) {
      return cudaErrorInvalidValue;  // of sums alone
    } else {
      rows_kernel<T, I, lanes, weight, EXTREME><<<grid, threads, 0, stream>>>(p);
      return cudaGetLastError();
    }
  });
  if (status != cudaSuccess || call.work.num_splits == 0) return status;
  const dim3 grid(static_cast<unsigned>(ceil_div(call.work.num_splits, Config::threads / 32)),
                  static_cast<unsigned>(ceil_div(p.num_feats, 32)));
  const Item<I>* splits = static_cast<const Item<I>*>(call.work.splits);
  combine_kernel<T, I, EXTREME><<<grid, Config::threads, 0, stream>>>(p, splits, call.work.num_splits);
  return cudaGetLastError();
}

}  // namespace

int64_t spmm_rows_workspace_bytes(const SpmmCall& call) {
  return call.work.num_parts * call.num_feats * call.part_bytes(sizeof(Position));
}

cudaError_t spmm_rows(const SpmmCall& call, Slice slice, cudaStream_t stream) {
  return with_types(call.dtype, call.graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p{};
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
    p.parts.values = static_cast<Acc<T>*>(call.workspace);
    p.parts.where = reinterpret_cast<Position*>(p.parts.values + call.work.num_parts * p.num_feats);
    p.mean = call.reduce == Reduce::mean;
    p.sign = call.reduce == Reduce::min ? -1 : 1;
    p.empty_value = call.empty_value;
    return call.extreme() ? launch<T, I, true>(call, slice, p, stream) : launch<T, I, false>(call, slice, p, stream);
  });
}

}  // namespace cuda
}  // namespace gnnaccel
