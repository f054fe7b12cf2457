// SDDMM (dot) by rows of a work list: out[edge] = dot(x[source], y[row]).
//
// A worker is a group of lanes that keeps one row of y in registers and walks the row's nonzeros (or those of a piece
// of it), eight at a time: sources gathered with 16-byte loads, eight partial sums a lane, and then one round of
// shuffles that halves the sums with each step, so that eight results cost seven to nine shuffles instead of 24 to
// 40, and neighbouring lanes write neighbouring results. Pieces need nothing added: every nonzero has a result of
// its own. What the order of the work list buys is said in spmm_rows.cu. Row in registers, one reduction for several
// edges: RoDe (Pang et al., 2024); the order: HP-SDDMM (Fan et al.).
#include "sddmm.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int batch = 8;            // nonzeros whose sums are shuffled together
  static constexpr int short_threads = 256;  // of the kernel for short rows, which keeps more of them in registers
  static constexpr int64_t short_degree = 8;
  static constexpr int64_t short_nonzeros = 1000000;  // below, latency is all that counts, and every lane helps
  static constexpr int64_t long_degree = 256;
  static constexpr int64_t many_nonzeros = 30000000;  // their results do not fit L2
  static constexpr int max_vectors = 64;              // of 16 bytes in a row: two for each of 32 lanes
};

template <typename T, typename I>
struct Params {
  const Item<I>* items;
  const I* steps;
  int64_t num_items;
  const I* sources;  // row of x of each nonzero; null: the nonzero's own
  const I* edge_ids;
  const T* x;
  const T* y;
  T* out;
  int len;
  int first;        // feature of the slice
  bool accumulate;  // add to what the slices before left in out
};

// Adds sum[u] over the group's L lanes. A lane gets the totals of nonzeros which and, with four lanes, which + 1;
// `writes` tells whether it is the one to write them.
template <int L, typename A>
__device__ __forceinline__ void sum_of_eight(const A (&sum)[8], int lane, A (&total)[L < 8 ? 2 : 1], int& which,
                                             bool& writes) {
  const bool half = lane & (L / 2), quarter = lane & (L / 4);
  A four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    four[i] = (half ? sum[i + 4] : sum[i]) + __shfl_xor_sync(~0u, half ? sum[i] : sum[i + 4], L / 2);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    two[i] = (quarter ? four[i + 2] : four[i]) + __shfl_xor_sync(~0u, quarter ? four[i] : four[i + 2], L / 4);
  }
  which = 4 * half + 2 * quarter;
  if constexpr (L < 8) {
    total[0] = two[0];
    total[1] = two[1];
    writes = true;
  } else {
    const bool eighth = lane & (L / 8);
    total[0] = (eighth ? two[1] : two[0]) + __shfl_xor_sync(~0u, eighth ? two[0] : two[1], L / 8);
#pragma unroll
    for (int step = L / 16; step; step /= 2) total[0] += __shfl_xor_sync(~0u, total[0], step);
    which += eighth;
    writes = lane % (L / 8) == 0;
  }
}

// L lanes to a worker, each with R vectors of a row.
template <typename T, typename I, int L, int R>
__global__ void __launch_bounds__(R > 2 ? Config::short_threads : kMaxListThreads,
                                  R > 2                              ? 3
                                  : sizeof(T) != 4 || sizeof(I) != 4 ? 1
                                                                     : 2) dot_kernel(const Params<T, I> p) {
  constexpr int N = 16 / sizeof(T);
  constexpr int batch = Config::batch;
  constexpr int fetched = batch / R;               // in flight together
  constexpr int held = L < batch ? batch / L : 1;  // sources of a lane
  static_assert(kPieceRun % batch == 0, "a batch lies in one run");
  const int lane = threadIdx.x % L;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (blockDim.x / L) + threadIdx.x / L;
  I begin = 0, end = 0, row = 0, skip = 0;  // skip: nonzeros of the row's other pieces between two runs of this one
  if (i < p.num_items) {
    const Item<I> item = load_item(p.items + i);
    begin = item.begin;
    end = item.end;
    row = item.row;
    if (item.part) skip = __ldg(p.steps + item.part - 1) - kPieceRun;
  }
  Pack<T, N> y[R];
  int offset[R];
  bool inside[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int d = p.first + (r * L + lane) * N;
    inside[r] = d < p.len;
    offset[r] = inside[r] ? d : 0;  // lanes past the end read the row's first vector and add nothing
    load(p.y + static_cast<int64_t>(row) * p.len + offset[r], y[r]);
  }
  I k = begin, source[held];
  auto load_sources = [&]() {
#pragma unroll
    for (int h = 0; h < held; ++h) {
      const I ahead = h * L + lane;
      const bool there = ahead < batch && ahead < end - k;
      source[h] = there ? k + ahead : 0;
      if (p.sources && there) source[h] = __ldg(p.sources + k + ahead);
    }
  };
  load_sources();
#pragma unroll 1
  while (__any_sync(~0u, k < end)) {
    const I here = k, left = end - k;
    I own[held];
#pragma unroll
    for (int h = 0; h < held; ++h) own[h] = source[h];
    const I next = (k + batch - begin) % kPieceRun ? batch : batch + skip;
    k = left > next ? k + next : end;
    load_sources();
    Acc<T> sum[batch];
    auto take = [&](auto full) {
      constexpr bool FULL = decltype(full)::value;
#pragma unroll
      for (int first = 0; first < batch; first += fetched) {
        Pack<T, N> x[fetched][R];
#pragma unroll
        for (int u = 0; u < fetched; ++u) {
          const int j = first + u;
          const T* from = row_address(p.x, __shfl_sync(~0u, own[j / L], j % L, L), p.len);
#pragma unroll
          for (int r = 0; r < R; ++r) {
            if (!FULL) x[u][r].raw = {};
            if (FULL || j < left) load(from + offset[r], x[u][r]);
          }
        }
#pragma unroll
        for (int u = 0; u < fetched; ++u) {
          sum[first + u] = 0;
#pragma unroll
          for (int r = 0; r < R; ++r) {
            Acc<T> dot = 0;
#pragma unroll
            for (int n = 0; n < N; ++n) dot += widen(x[u][r].values[n]) * widen(y[r].values[n]);
            sum[first + u] += inside[r] ? dot : Acc<T>(0);  // a zero y would not do: x may be infinite
          }
        }
      }
    };
    if (__all_sync(~0u, left >= batch)) {
      take(std::true_type{});
    } else {
      take(std::false_type{});
    }
    int which;
    bool writes;
    Acc<T> total[L < 8 ? 2 : 1];
    sum_of_eight<L>(sum, lane, total, which, writes);
#pragma unroll
    for (int t = 0; t < (L < 8 ? 2 : 1); ++t) {
      if (!writes || which + t >= left) continue;
      const I at = here + which + t;
      T* to = p.out + (p.edge_ids ? __ldg(p.edge_ids + at) : at);
      *to = narrow<T>(p.accumulate ? widen(*to) + total[t] : total[t]);
    }
  }
}

bool short_rows(const DotCall& call) {
  return call.graph.nnz / call.graph.num_rows < Config::short_degree && call.graph.nnz >= Config::short_nonzeros;
}

struct Shape {
  int lanes;    // 4, 8, 16 or 32
  int vectors;  // of a lane: 1, 2 or 4; a launch takes lanes * vectors of a row, and wider rows several launches
};

// Several vectors to a lane mean more rows in flight and fewer shuffles. H200, 128 features, yeast-like (degree 2):
// 8 lanes of 4 take 0.64 ms, 16 of 2 take 0.82; 8 of 4 lose up to a tenth elsewhere.
// Where rows are long and neighbours in the list share no sources, slices of 256 bytes keep a smaller table in the
// caches: reddit-like, 256 features, 11.3 ms instead of 17.9 for whole rows, though the sums are read and written
// again.
Shape shape_of(const DotCall& call, int64_t vectors) {
  const int64_t degree = call.graph.nnz / call.graph.num_rows;
  if (vectors <= 4) return {4, 1};
  if (vectors <= 8) return short_rows(call) ? Shape{4, 2} : Shape{8, 1};
  if (vectors <= 16) return {8, 2};
  const bool rounds = call.dtype == DType::bf16 || call.dtype == DType::f16;  // sums left in out would lose their bits
  if (degree >= Config::long_degree && !call.work.clustered && !rounds) return {8, 2};
  if (vectors <= 32) return short_rows(call) ? Shape{8, 4} : Shape{16, 2};
  return {32, 2};
}

template <typename F>
cudaError_t with_shape(Shape shape, F f) {
  using std::integral_constant;
  if (shape.lanes == 32) return f(integral_constant<int, 32>{}, integral_constant<int, 2>{});
  if (shape.lanes == 4 && shape.vectors == 2) return f(integral_constant<int, 4>{}, integral_constant<int, 2>{});
  if (shape.lanes == 4) return f(integral_constant<int, 4>{}, integral_constant<int, 1>{});
  if (shape.lanes == 16) return f(integral_constant<int, 16>{}, integral_constant<int, 2>{});
  if (shape.vectors == 4) return f(integral_constant<int, 8>{}, integral_constant<int, 4>{});
  if (shape.vectors == 2) return f(integral_constant<int, 8>{}, integral_constant<int, 2>{});
  return f(integral_constant<int, 8>{}, integral_constant<int, 1>{});
}

int64_t vectors_of(const DotCall& call) { return call.len / (16 / size_of(call.dtype)); }

}  // namespace

bool sddmm_rows_serves(const DotCall& call) {
  const int64_t n = 16 / size_of(call.dtype);
  const bool aligned = (reinterpret_cast<uintptr_t>(call.x) | reinterpret_cast<uintptr_t>(call.y)) % 16 == 0;
  if (!call.work.items || !aligned || call.len % n || vectors_of(call) > Config::max_vectors) return false;
  // Left to sddmm_balanced.cu, whose neighbouring workers write neighbouring results: whole rows of two edges
  // (yeast-like D=256, 1.21 ms against 0.96), and 64 bytes of features in an order that scatters results
  // (products-like, 3.9 and 3.2).
  const int64_t degree = call.graph.nnz / call.graph.num_rows;
  if (short_rows(call)) return vectors_of(call) <= 32;
  const bool scattered =
      call.graph.nnz >= Config::many_nonzeros && degree < Config::long_degree && !call.work.clustered;
  return vectors_of(call) > 4 || !scattered;
}

cudaError_t sddmm_rows(const DotCall& call, cudaStream_t stream) {
  return with_types(call.dtype, call.graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p{};
    p.items = static_cast<const Item<I>*>(call.work.items);
    p.steps = static_cast<const I*>(call.work.steps);
    p.num_items = call.work.num_items;
    p.edge_ids = static_cast<const I*>(call.graph.edge_ids);
    p.sources = call.x_by_edge ? p.edge_ids : static_cast<const I*>(call.graph.indices);
    p.x = static_cast<const T*>(call.x);
    p.y = static_cast<const T*>(call.y);
    p.out = static_cast<T*>(call.out);
    p.len = static_cast<int>(call.len);
    return with_shape(shape_of(call, vectors_of(call)), [&](auto lanes, auto vectors) {
      const int threads = vectors > 2 ? Config::short_threads : list_threads(call.graph);
      const unsigned blocks = static_cast<unsigned>(ceil_div(p.num_items, threads / lanes));
      for (p.first = 0; p.first < p.len; p.first += lanes * vectors * (16 / sizeof(T))) {
        p.accumulate = p.first > 0;
        dot_kernel<T, I, lanes, vectors><<<blocks, threads, 0, stream>>>(p);
      }
      return cudaGetLastError();
    });
  });
}

}  // namespace cuda
}  // namespace gnnaccel
