// SpMM balanced over nonzeros: every worker takes the same number of consecutive nonzeros, whatever rows they lie in.
//
// A worker is a group of 4 to 32 lanes, 16 bytes of features each. It gathers sources without regard to rows, so
// that eight loads of a lane are in flight even where rows have two nonzeros, and switches rows in registers: a
// lane finds the row of one nonzero of the tile while the gathers are under way (a look at indptr, which answers
// at once where rows are long), a ballot tells where rows end. A row inside one worker is written by it; parts of a
// row in one block meet in shared memory; parts of a row in several blocks go to the workspace, and a second kernel
// adds them in order, and writes the rows without nonzeros. Nothing is prepared, zero-filled or added atomically,
// and the bits are the same on every run.
//
// For graphs seen once (sampled mini-batches), and for low degrees. HP-SpMM (Fan et al.) for equal nonzeros per
// worker; merge-based SpMM (Merrill and Garland; Yang, Buluc and Owens) for the carries.
#include "spmm.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 256;
  static constexpr int batch = 8;  // gathers of a lane in flight
  // Nonzeros of a worker. Few where rows are short (yeast-like: 16 beats 64 by a tenth), and on small graphs, which
  // should fill the chip; more where rows are long, so that fewer are cut (H200, benchmarks/results).
  static constexpr int64_t piece_short = 16;
  static constexpr int64_t piece = 64;
  static constexpr int64_t piece_long = 128;
  static constexpr int64_t short_degree = 8;
  static constexpr int64_t long_degree = 128;
  static constexpr int64_t target_workers = 32768;
};

// On a multiprocessor: the registers of eight 16-byte gathers, more where sums, indices or weights take more.
template <typename T, typename I, Weight WEIGHT>
constexpr int min_blocks = sizeof(T) == 4 && sizeof(I) == 4 && WEIGHT != Weight::heads ? 4 : 3;

int64_t piece_of(int64_t num_rows, int64_t nnz, int lanes) {
  const int64_t degree = nnz / num_rows;
  int64_t piece = degree < Config::short_degree  ? Config::piece_short
                  : degree < Config::long_degree ? Config::piece
                                                 : Config::piece_long;
  while (piece > Config::piece_short && nnz / piece < Config::target_workers) piece /= 2;
  const int64_t tile = lanes < 8 ? 8 : lanes;
  return piece < tile ? tile : piece;
}

template <typename T, typename I>
struct Params {
  const I* indptr;
  const I* indices;
  const I* edge_ids;
  SourceScale<T, I> source_scale;
  int64_t num_rows;
  int64_t nnz;
  Operand lhs;
  Operand rhs;
  T* out;
  int64_t num_feats;
  bool mean;
  double empty_value;
  Epilogue<T> epilogue;
  int64_t piece;
  int64_t num_blocks;
  Parts<T, I> parts;  // 2 * num_blocks: of a row begun before the block, of one that goes on after it
  I* ends;            // [num_blocks]: the row begun before the block that ends in it, or -1

  __device__ __forceinline__ int64_t degree_of(int64_t row) const {
    return mean ? static_cast<int64_t>(__ldg(indptr + row + 1)) - __ldg(indptr + row) : 1;
  }
};

// Row of nonzero k, at or after row `low`; `end` is the row's end.
template <typename I>
__device__ __forceinline__ I row_from(const I* indptr, I num_rows, I low, I k, I& end) {
  end = __ldg(indptr + low + 1);
  if (end > k) return low;
  I step = 1, high;
  for (++low; (high = step < num_rows - low ? low + step : num_rows) < num_rows && __ldg(indptr + high) <= k;
       step *= 2) {
    low = high;
  }
  low = static_cast<I>(find_row(indptr, high, k, low));
  end = __ldg(indptr + low + 1);
  return low;
}

enum State : int {
  open = 1,
  ended = 2,
  begun_before = 4
};  // of a worker: its last row goes on; a row ended in it; ...
constexpr int kThrough = open | begun_before;  // all its nonzeros are of one row that is longer

template <typename T, typename I, int L, Weight WEIGHT>
__global__ void __launch_bounds__(Config::threads, min_blocks<T, I, WEIGHT>) balanced_kernel(const Params<T, I> p) {
  constexpr int N = 16 / sizeof(T);
  constexpr int workers = Config::threads / L;
  constexpr int tile = L < 8 ? 8 : L;  // nonzeros whose indices the lanes hold
  constexpr int held = tile / L;
  constexpr int batch = Config::batch;
  static_assert(held == 1 ? tile % batch == 0 : tile == batch, "lanes hold a whole number of batches");
  using Row = Sums<T, I, N>;
  __shared__ Row tails[workers][L], heads[workers][L];
  __shared__ I head_rows[workers];
  __shared__ int states[workers];
  const int lane = threadIdx.x % L, worker = threadIdx.x / L;
  const int64_t slice = static_cast<int64_t>(blockIdx.y) * L;
  const int64_t feature = (slice + lane) * N;
  const bool writes = feature < p.num_feats;
  const int64_t d = writes ? feature : slice * N;  // lanes past the end repeat the slice's first, and write nothing
  const int64_t first_of_all = (static_cast<int64_t>(blockIdx.x) * workers + worker) * p.piece;
  const I begin = static_cast<I>(first_of_all < p.nnz ? first_of_all : p.nnz);
  I left = static_cast<I>(p.nnz - begin < p.piece ? p.nnz - begin : p.piece);  // nonzeros from k on
  const bool present = left > 0;
  Reader<T, N> lhs(p.lhs, d);
  const Reader<T, 1> rhs(p.rhs, d);
  lhs.wide = true;  // said to the compiler, which then keeps no registers for the other case
  Row sums;
  sums.clear();
  int state = 0;
  if (__any_sync(~0u, present)) {
    // Workers past the end read the last nonzero and do nothing with it.
    const I last = begin + left - 1;
    I source[held];
    auto mine = [&](I k, int h, I left) { return h * L + lane < left ? k + h * L + lane : last; };
    auto load_sources = [&](I k, I left) {
#pragma unroll
      for (int h = 0; h < held; ++h) source[h] = __ldg(p.indices + mine(k, h, left));
    };
    load_sources(begin, left);
    I current = find_row_by_group<L>(p.indptr, p.num_rows, present ? begin : last);
    if (present && __ldg(p.indptr + current) < begin) state = begun_before;
#pragma unroll 1
    for (I k = begin, run = 0; run < p.piece; run += tile, k += tile, left -= tile) {
      I col[held], row[held], edge[held];
      Acc<T> weight[held];
      unsigned row_ends = 0;
#pragma unroll
      for (int h = 0; h < held; ++h) {
        col[h] = source[h];
        edge[h] = mine(k, h, left);
        if constexpr (WEIGHT != Weight::none) {
          if (p.edge_ids) edge[h] = __ldg(p.edge_ids + edge[h]);
          if constexpr (one_for_all_features<WEIGHT>) weight[h] = scale_of<T, WEIGHT>(p, col[h], edge[h]);
        }
      }
#pragma unroll 1
      for (int first = 0; first < tile; first += batch) {
        Pack<T, N> x[batch];
        Pack<T, 1> own[batch];
#pragma unroll
        for (int u = 0; u < batch; ++u) {
          const int j = first + u;
          lhs.fetch(__shfl_sync(~0u, col[u / L], j % L, L), x[u]);
          if constexpr (WEIGHT == Weight::heads) rhs.fetch(__shfl_sync(~0u, edge[u / L], j % L, L), own[u]);
        }
        if (first == 0) {
          load_sources(k + tile, left - tile);
#pragma unroll
          for (int h = 0; h < held; ++h) {
            const I at = mine(k, h, left);
            I row_end;
            row[h] = row_from(p.indptr, static_cast<I>(p.num_rows), current, at, row_end);
            row_ends |= group_ballot<L>(h * L + lane < left && row_end == at + 1) << (h * L % 32);
            current = __shfl_sync(~0u, row[h], L - 1, L);
          }
        }
        const bool whole = __all_sync(~0u, row_ends == 0 && left >= tile);
#pragma unroll
        for (int u = 0; u < batch; ++u) {
          const int j = first + u;
          Acc<T> scale = 1;
          if constexpr (one_for_all_features<WEIGHT>) scale = __shfl_sync(~0u, weight[u / L], j % L, L);
          if constexpr (WEIGHT == Weight::heads) scale = widen(own[u].values[0]);
          auto take = [&]() {
            if constexpr (WEIGHT == Weight::none) {
              sums.add(x[u]);
            } else {
              sums.add(scale, x[u]);
            }
            state |= open;
          };
          if (whole) {
            take();
            continue;
          }
          const I at_row = __shfl_sync(~0u, row[u / L], j % L, L);
          if (j >= left) continue;
          take();
          if (!(row_ends >> j & 1)) continue;
          if (state == kThrough) {  // the first row to end here, begun before
            heads[worker][lane] = sums;
            head_rows[worker] = at_row;
          } else if (writes) {
            sums.template write<WEIGHT == Weight::fused>(p, at_row, d, p.degree_of(at_row));
          }
          state = (state | ended) & ~open;
          sums.clear();
        }
      }
    }
  }
  tails[worker][lane] = sums;
  if (lane == 0) states[worker] = state;
  __syncthreads();
  // The tails of workers up to `to` that belong to the row that goes on after it; whether it began before the block.
  auto carried = [&](int to, bool& from_before) {
    int from = to;
    while (from >= 0 && states[from] == kThrough) --from;
    from_before = from < 0;
    Row sum;
    sum.clear();
    for (int w = from < 0 ? 0 : from; w <= to; ++w) sum.add(tails[w][lane]);
    return sum;
  };
  auto write_part = [&](int64_t part, const Row& sum) { sum.write_part(p.parts, part, d, p.num_feats); };
  if ((state & (ended | begun_before)) == (ended | begun_before)) {
    bool from_before = true;
    Row sum;
    sum.clear();
    if (worker > 0) sum = carried(worker - 1, from_before);
    sum.add(heads[worker][lane]);
    const int64_t row = head_rows[worker];
    if (writes && from_before) write_part(2 * static_cast<int64_t>(blockIdx.x), sum);
    if (writes && !from_before) sum.template write<WEIGHT == Weight::fused>(p, row, d, p.degree_of(row));
  }
  if (worker == workers - 1 && (state & open)) {
    bool from_before;
    const Row sum = carried(worker, from_before);
    if (writes) write_part(2 * static_cast<int64_t>(blockIdx.x) + 1, sum);
  }
  if (threadIdx.x == 0 && blockIdx.y == 0) {
    int w = 0;
    while (w < workers && states[w] == kThrough) ++w;
    const bool ends = w < workers && (states[w] & (ended | begun_before)) == (ended | begun_before);
    p.ends[blockIdx.x] = ends ? head_rows[w] : I{-1};
  }
}

// A warp adds the parts of the row that ends in one block, and writes those of 32 rows that are without nonzeros, for
// 32 features (blockIdx.y).
template <typename T, typename I>
__global__ void __launch_bounds__(Config::threads) finish_kernel(const Params<T, I> p, int64_t span) {
  const int lane = threadIdx.x % 32;
  const int64_t d = static_cast<int64_t>(blockIdx.y) * 32 + lane;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (Config::threads / 32) + threadIdx.x / 32;
  const I row = warp < p.num_blocks ? p.ends[warp] : I{-1};
  if (row >= 0) {
    const int64_t first = p.indptr[row] / span, degree = static_cast<int64_t>(p.indptr[row + 1]) - p.indptr[row];
    if (d < p.num_feats) {
      Combined<T, I, false> sum;
      auto place = [&](int64_t block) { return (2 * block + 1) * p.num_feats + d; };
      sum.read(p.parts, first, warp, int64_t{1}, place);
      sum.merge(p.parts.values[2 * warp * p.num_feats + d], 0);
      sum.write(p, row, d, degree);
    }
  }
  const int64_t own = warp * 32 + lane;
  const bool empty = own < p.num_rows && p.indptr[own] == p.indptr[own + 1];
  for (unsigned left = __ballot_sync(~0u, empty); left; left &= left - 1) {
    if (d < p.num_feats) Combined<T, I, false>{}.write(p, warp * 32 + __ffs(left) - 1, d, 0);
  }
}

int64_t nonzeros_of_block(const SpmmCall& call, Slice slice) {
  return Config::threads / slice.lanes * piece_of(call.graph.num_rows, call.graph.nnz, slice.lanes);
}

}  // namespace

int64_t spmm_balanced_workspace_bytes(const SpmmCall& call, Slice slice) {
  const int64_t blocks = ceil_div(call.graph.nnz, nonzeros_of_block(call, slice));
  return blocks * (2 * call.num_feats * accumulator_size(call.dtype) + 8);
}

cudaError_t spmm_balanced(const SpmmCall& call, Slice slice, cudaStream_t stream) {
  return with_types(call.dtype, call.graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    const int64_t span = nonzeros_of_block(call, slice);
    Params<T, I> p{};
    p.indptr = static_cast<const I*>(call.graph.indptr);
    p.indices = static_cast<const I*>(call.graph.indices);
    p.edge_ids = static_cast<const I*>(call.graph.edge_ids);
    p.num_rows = call.graph.num_rows;
    p.nnz = call.graph.nnz;
    p.source_scale = SourceScale<T, I>::of(call.fused);
    p.epilogue = Epilogue<T>::of(call.fused);
    p.lhs = call.lhs;
    p.rhs = call.rhs;
    p.out = static_cast<T*>(call.out);
    p.num_feats = call.num_feats;
    p.mean = call.reduce == Reduce::mean;
    p.empty_value = call.empty_value;
    p.piece = piece_of(p.num_rows, p.nnz, slice.lanes);
    p.num_blocks = ceil_div(p.nnz, span);
    p.parts.values = static_cast<Acc<T>*>(call.workspace);
    p.ends = reinterpret_cast<I*>(p.parts.values + 2 * p.num_blocks * p.num_feats);
    const cudaError_t status = with_shape<32>(slice.lanes, weight_of(call), [&](auto lanes, auto weight) {
      const dim3 grid(static_cast<unsigned>(p.num_blocks), static_cast<unsigned>(slice.slices));
      balanced_kernel<T, I, lanes, weight><<<grid, Config::threads, 0, stream>>>(p);
      return cudaGetLastError();
    });
    if (status != cudaSuccess) return status;
    const int64_t warps = p.num_blocks > ceil_div(p.num_rows, 32) ? p.num_blocks : ceil_div(p.num_rows, 32);
    const dim3 grid(static_cast<unsigned>(ceil_div(warps, Config::threads / 32)),
                    static_cast<unsigned>(ceil_div(p.num_feats, 32)));
    finish_kernel<T, I><<<grid, Config::threads, 0, stream>>>(p, span);
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace gnnaccel
