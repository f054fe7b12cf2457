// SpMM of one to four features: sums and means, copied or with one weight an edge.
//
// Rows this narrow leave the lanes of the other kernels without work: of one feature, three quarters of the smallest
// group. Here a lane gathers a whole source. A block takes equally many rows and nonzeros together, along the merge
// path of both (Merrill and Garland, 2016), so that neither hubs nor runs of rows without nonzeros keep it longer than
// others. Its threads gather the sources of neighbouring nonzeros into shared memory; then 1 to 32 lanes, as rows are
// long there, add up each row that ends in the block, and neighbours write neighbouring rows.
//
// Of a row that began in another block, the block in which it ends gathers the rest as well; longer rows leave a part
// in every block, and a second kernel adds these in order. Nothing is prepared, zero-filled or added atomically, and
// the bits are the same on every run.
//
// What a sum of one feature has to move: 4 bytes a nonzero and 12 a row (int32, float32) and its sources' values from
// L2; road-like (1M rows, 2.7M nonzeros) 23 MB, 8 us of an H100's memory.
#include "spmm.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 256;
  static constexpr int lane_run = 4;      // nonzeros of a lane, in the mean
  static constexpr int longest_run = 16;  // a row of more for each of its lanes is left to a warp
  // Rows of more nonzeros leave parts instead of being gathered again.
  static constexpr int64_t longest_whole = 256;
};

// Rows and nonzeros of a thread: gathers of D features in flight.
template <int D>
constexpr int items_of = D == 1   ? 8
                         : D == 2 ? 4
                                  : 2;

template <typename T, typename I>
struct Params {
  const I* indptr;
  const I* indices;
  const I* edge_ids;
  SourceScale<T, I> source_scale;
  int64_t num_rows;
  int64_t nnz;
  const T* x;
  Operand rhs;
  T* out;
  int64_t num_feats;
  bool mean;
  double empty_value;
  Epilogue<T> epilogue;
  int64_t longest;    // rows of more nonzeros are cut where blocks end
  Parts<T, I> parts;  // 2 * blocks: of a row begun before the block, of one that goes on after it
  I* ends;            // [blocks]: the row in parts that ends in it, or -1; null: nothing is cut
};

// Values of one load, of a row of D.
template <typename T, int D>
constexpr int values_of = D == 3               ? 1
                          : D * sizeof(T) > 16 ? 16 / static_cast<int>(sizeof(T))
                                               : D;

// Rows that end among the first `count` rows and nonzeros of the merge path, each row after its nonzeros: by half of a
// block's threads for each of two counts, with 129 rows a round; all of its threads call it.
template <typename I>
__device__ __forceinline__ void rows_ended(const I* indptr, int64_t num_rows, int64_t count, int64_t (&path)[2]) {
  constexpr int half = Config::threads / 2, warps = half / 32;
  __shared__ int found[2][2][warps];
  const int side = threadIdx.x / half, warp = threadIdx.x % half / 32;
  int64_t low = 0, high = num_rows + 1;
  int turn = 0;
  for (int64_t range = high, step; range > 1; range = step, turn ^= 1) {
    step = (range + half) / (half + 1);
    const int64_t probe = low + (threadIdx.x % half + 1) * step;
    const bool below = probe < high && __ldg(indptr + probe) + probe <= count;
    const int before = __popc(__ballot_sync(~0u, below));
    if (threadIdx.x % 32 == 0) found[turn][side][warp] = before;
    __syncthreads();
    for (int w = 0; w < warps; ++w) low += found[turn][side][w] * step;
    high = low + step < high ? low + step : high;
  }
  if (threadIdx.x % half == 0) path[side] = low;
}

// A row's D values, summed up.
template <typename T, typename I, int D>
struct Row {
  static constexpr int N = values_of<T, D>;
  Sums<T, I, N> sums[D / N];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < D / N; ++i) sums[i].clear();
  }
  __device__ __forceinline__ Acc<T>& operator[](int d) { return sums[d / N].value[d % N]; }
  __device__ __forceinline__ void add_lanes(int lanes) {
    for (int step = lanes / 2; step; step /= 2) {
#pragma unroll
      for (int d = 0; d < D; ++d) (*this)[d] += __shfl_xor_sync(~0u, (*this)[d], step);
    }
  }
  template <bool EPILOGUE>
  __device__ __forceinline__ void write(const Params<T, I>& p, int64_t row, int64_t degree) const {
#pragma unroll
    for (int i = 0; i < D / N; ++i) sums[i].template write<EPILOGUE>(p, row, i * N, degree);
  }
  __device__ __forceinline__ void write_part(const Params<T, I>& p, int64_t part) const {
#pragma unroll
    for (int i = 0; i < D / N; ++i) sums[i].write_part(p.parts, part, i * N, D);
  }
};

template <typename T, typename I, int D, Weight WEIGHT>
__global__ void __launch_bounds__(Config::threads) narrow_kernel(const Params<T, I> p) {
  constexpr int ITEMS = items_of<D>, N = values_of<T, D>;
  constexpr int threads = Config::threads, warps = threads / 32, tile = threads * ITEMS;
  constexpr bool fused = WEIGHT == Weight::fused;
  using A = Acc<T>;
  __shared__ A values[D][tile + tile / 32];
  __shared__ A rest[warps][D];  // of the first row, before the block
  __shared__ int64_t path[2];
  __shared__ int left[tile / Config::longest_run], num_left;
  // Rows of 4, 8 .. nonzeros side by side would all begin in the same banks.
  auto place = [](int i) { return i + i / 32; };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t block = blockIdx.x, all = p.num_rows + p.nnz;
  auto border = [&](int side) { return (block + side) * tile < all ? (block + side) * tile : all; };
  rows_ended(p.indptr, p.num_rows, border(threadIdx.x / (threads / 2)), path);
  if (threadIdx.x == 0) num_left = 0;
  __syncthreads();
  const int64_t first_row = path[0], last_row = path[1];  // the rows first_row .. last_row - 1 end here
  const I begin = static_cast<I>(border(0) - first_row);
  I end = static_cast<I>(border(1) - last_row);
  const bool ends = first_row < last_row;
  const I own_begin = __ldg(p.indptr + first_row), own_end = ends ? __ldg(p.indptr + first_row + 1) : end;
  const bool before = ends && own_begin < begin;  // the first row has nonzeros before the block
  const bool joins = before && own_end - own_begin > p.longest;
  bool goes_on = false;  // the row after the last one leaves a part
  I next_begin = end;
  if (last_row < p.num_rows) {
    next_begin = __ldg(p.indptr + last_row);
    goes_on = __ldg(p.indptr + last_row + 1) - next_begin > p.longest;
    if (next_begin < begin) next_begin = begin;
    if (!goes_on) end = next_begin;  // the block in which it ends gathers it
  }
  if (p.ends && threadIdx.x == 0) p.ends[block] = joins ? static_cast<I>(first_row) : I{-1};
  if (!ends && !goes_on) return;

  I source[ITEMS], edge[ITEMS];
  Pack<T, N> x[ITEMS][D / N];
  A scale[ITEMS];
  auto find = [&](I k, I& from, I& id) {
    from = __ldg(p.indices + k);
    id = k;
    if (WEIGHT != Weight::none && p.edge_ids) id = __ldg(p.edge_ids + k);
  };
  auto fetch = [&](I from, I id, Pack<T, N>(&to)[D / N], A& by) {
    const T* row = row_address(p.x, from, D);
#pragma unroll
    for (int i = 0; i < D / N; ++i) load(row + i * N, to[i]);
    if constexpr (WEIGHT != Weight::none) by = scale_of<T, WEIGHT>(p, from, id);
  };
  auto scaled = [&](const Pack<T, N>(&from)[D / N], A by, int d) {
    const A value = widen(from[d / N].values[d % N]);
    return WEIGHT == Weight::none ? value : by * value;
  };
  const int mine = static_cast<int>(end - begin) - static_cast<int>(threadIdx.x);
#pragma unroll
  for (int u = 0; u < ITEMS; ++u) {
    if (u * threads < mine) find(begin + u * threads + threadIdx.x, source[u], edge[u]);
  }
#pragma unroll
  for (int u = 0; u < ITEMS; ++u) {
    if (u * threads < mine) fetch(source[u], edge[u], x[u], scale[u]);
  }
  if (before && !joins) {
    Row<T, I, D> sum;
    sum.clear();
#pragma unroll 4
    for (I k = own_begin + threadIdx.x; k < begin; k += threads) {
      I from, id;
      Pack<T, N> one[D / N];
      A by = 1;
      find(k, from, id);
      fetch(from, id, one, by);
#pragma unroll
      for (int d = 0; d < D; ++d) sum[d] += scaled(one, by, d);
    }
    __syncwarp();
    sum.add_lanes(32);
#pragma unroll
    for (int d = 0; d < D; ++d) {
      if (lane == 0) rest[warp][d] = sum[d];
    }
  }
#pragma unroll
  for (int u = 0; u < ITEMS; ++u) {
    if (u * threads >= mine) continue;
#pragma unroll
    for (int d = 0; d < D; ++d) values[d][place(u * threads + threadIdx.x)] = scaled(x[u], scale[u], d);
  }
  __syncthreads();

  // What lanes have of the block's nonzeros from .. to - 1, all of one row; every lane of a warp calls it.
  auto add_up = [&](int from, int to, int lane, int lanes) {
    Row<T, I, D> sum;
    sum.clear();
#pragma unroll 4
    for (int i = from + lane; i < to; i += lanes) {
#pragma unroll
      for (int d = 0; d < D; ++d) sum[d] += values[d][place(i)];
    }
    __syncwarp();
    sum.add_lanes(lanes);
    return sum;
  };
  const int rows = static_cast<int>(last_row - first_row), count = static_cast<int>(end - begin);
  int lanes = 1;
  while (lanes < 32 && lanes * Config::lane_run * rows < count) lanes *= 2;
  const int group = threadIdx.x / lanes, groups = threads / lanes;
  for (int first = 0; first < rows; first += groups) {
    const int own = first + group;
    const bool there = own < rows && (own > 0 || !before);
    int from = 0, to = 0;
    if (there) {
      from = static_cast<int>(__ldg(p.indptr + first_row + own) - begin);
      to = static_cast<int>(__ldg(p.indptr + first_row + own + 1) - begin);
    }
    const int degree = to - from;
    const bool later = lanes < 32 && degree > Config::longest_run * lanes;
    const bool leads = threadIdx.x % lanes == 0;
    if (later && leads) left[atomicAdd(&num_left, 1)] = own;
    const Row<T, I, D> sum = add_up(from, later ? from : to, threadIdx.x % lanes, lanes);
    if (there && !later && leads) sum.template write<fused>(p, first_row + own, degree);
  }
  __syncthreads();
  // A warp each: the row begun before, the one that goes on, and those left.
  for (int i = warp; i < num_left + 2; i += warps) {
    if (i == 0 ? !before : i == 1 && !goes_on) continue;
    const int64_t row = i == 0 ? first_row : i == 1 ? last_row : first_row + left[i - 2];
    const int from = i == 0 ? 0 : static_cast<int>((i == 1 ? next_begin : __ldg(p.indptr + row)) - begin);
    const int to = i == 1 ? count : static_cast<int>(__ldg(p.indptr + row + 1) - begin);
    Row<T, I, D> sum = add_up(from, to, lane, 32);
    if (lane != 0) continue;
    if (i == 1 || (i == 0 && joins)) {
      sum.write_part(p, 2 * block + i);
      continue;
    }
    for (int w = 0; i == 0 && w < warps; ++w) {
#pragma unroll
      for (int d = 0; d < D; ++d) sum[d] += rest[w][d];
    }
    sum.template write<fused>(p, row, i == 0 ? static_cast<int64_t>(own_end - own_begin) : to - from);
  }
}

// A warp adds the parts of the row that ends in one block.
template <typename T, typename I, int D, bool FUSED>
__global__ void __launch_bounds__(Config::threads) join_kernel(const Params<T, I> p, int64_t blocks, int64_t tile) {
  const int lane = threadIdx.x % 32;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (Config::threads / 32) + threadIdx.x / 32;
  const I row = block < blocks ? p.ends[block] : I{-1};
  if (row < 0) return;
  const int64_t begin = p.indptr[row], degree = p.indptr[row + 1] - begin;
  double sum[D] = {};
  for (int64_t other = (begin + row) / tile + lane; other < block; other += 32) {
#pragma unroll
    for (int d = 0; d < D; ++d) sum[d] += p.parts.values[(2 * other + 1) * D + d];
  }
  __syncwarp();
  for (int step = 16; step; step /= 2) {
#pragma unroll
    for (int d = 0; d < D; ++d) sum[d] += __shfl_xor_sync(~0u, sum[d], step);
  }
  if (lane != 0) return;
  Row<T, I, D> result;
#pragma unroll
  for (int d = 0; d < D; ++d) result[d] = static_cast<Acc<T>>(sum[d] + p.parts.values[2 * block * D + d]);
  result.template write<FUSED>(p, row, degree);
}

int64_t tile_of(const SpmmCall& call) {
  const int64_t feats = call.num_feats;
  return Config::threads * (feats == 1 ? items_of<1> : feats == 2 ? items_of<2> : items_of<4>);
}
int64_t blocks_of(const SpmmCall& call) { return ceil_div(call.graph.num_rows + call.graph.nnz, tile_of(call)); }

// A second kernel is spared where a list has no rows in pieces.
bool cuts(const SpmmCall& call) { return !(call.work.items && call.work.num_splits == 0); }

// H100, sums of 1, 2, 3 and 4 features, times as fast as by rows of a list: yeast-like (degree 2.1) 2.8, 2.3, 1.6, 1.2;
// road-like (2.7) 2.3, 1.9, 1.4, 1.1; dd (5.0) 1.4, 1.1, 0.8, 0.7; mesh-like (6.0) 0.9; amazon0505-like (11.9) 0.9,
// 0.9, 0.7, 0.6. On small graphs latency is all that counts: cora 0.7.
bool pays(const Csr& graph, int64_t num_feats) {
  return graph.nnz >= 1000000 && 2 * graph.nnz < (num_feats <= 2 ? 11 : 8) * graph.num_rows;
}

// Calls f with the number of features as an integral constant.
template <typename F>
cudaError_t with_features(int64_t num_feats, F f) {
  switch (num_feats) {
    case 1:
      return f(std::integral_constant<int, 1>{});
    case 2:
      return f(std::integral_constant<int, 2>{});
    case 3:
      return f(std::integral_constant<int, 3>{});
    case 4:
      return f(std::integral_constant<int, 4>{});
  }
  return cudaErrorInvalidValue;
}

template <int D, typename T, typename I, typename W>
cudaError_t launch(const Params<T, I>& p, const SpmmCall& call, W weight, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(blocks_of(call));
  narrow_kernel<T, I, D, weight><<<blocks, Config::threads, 0, stream>>>(p);
  if (p.ends) {
    const unsigned joins = static_cast<unsigned>(ceil_div(blocks, Config::threads / 32));
    constexpr bool fused = weight == Weight::fused;
    join_kernel<T, I, D, fused><<<joins, Config::threads, 0, stream>>>(p, blocks, tile_of(call));
  }
  return cudaGetLastError();
}

}  // namespace

bool spmm_narrow_serves(const SpmmCall& call) {
  const int64_t D = call.num_feats;
  const bool scales = call.message == Message::copy_lhs || (call.message == Message::mul && call.rhs.len == 1);
  if (call.extreme() || D > 4 || !pays(call.graph, D) || !scales || !call.lhs.data || call.lhs.div != 1 ||
      call.lhs.len != D)
    return false;
  const int size = size_of(call.dtype), bytes = D == 3 ? size : static_cast<int>(D * size < 16 ? D * size : 16);
  return (reinterpret_cast<uintptr_t>(call.lhs.data) | reinterpret_cast<uintptr_t>(call.out)) % bytes == 0;
}

int64_t spmm_narrow_workspace_bytes(const SpmmCall& call) {
  return cuts(call) ? blocks_of(call) * (2 * call.num_feats * accumulator_size(call.dtype) + 8) : 0;
}

cudaError_t spmm_narrow(const SpmmCall& call, cudaStream_t stream) {
  return with_types(call.dtype, call.graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p{};
    p.indptr = static_cast<const I*>(call.graph.indptr);
    p.indices = static_cast<const I*>(call.graph.indices);
    p.edge_ids = static_cast<const I*>(call.graph.edge_ids);
    p.num_rows = call.graph.num_rows;
    p.nnz = call.graph.nnz;
    p.source_scale = SourceScale<T, I>::of(call.fused);
    p.epilogue = Epilogue<T>::of(call.fused);
    p.x = static_cast<const T*>(call.lhs.data);
    p.rhs = call.rhs;
    p.out = static_cast<T*>(call.out);
    p.num_feats = call.num_feats;
    p.mean = call.reduce == Reduce::mean;
    p.empty_value = call.empty_value;
    p.longest = INT64_MAX;
    if (cuts(call)) {
      p.longest = Config::longest_whole;
      p.parts.values = static_cast<Acc<T>*>(call.workspace);
      p.ends = reinterpret_cast<I*>(p.parts.values + 2 * blocks_of(call) * p.num_feats);
    }
    return with_features(p.num_feats, [&](auto feats) {
      switch (weight_of(call)) {
        case Weight::none:
          return launch<feats>(p, call, std::integral_constant<Weight, Weight::none>{}, stream);
        case Weight::fused:
          return launch<feats>(p, call, std::integral_constant<Weight, Weight::fused>{}, stream);
        default:
          return launch<feats>(p, call, std::integral_constant<Weight, Weight::scalar>{}, stream);
      }
    });
  });
}

}  // namespace cuda
}  // namespace gnnaccel
