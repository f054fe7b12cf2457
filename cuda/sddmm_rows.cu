// SDDMM (dot) by rows of a work list: out[edge] = dot(x[source], y[row]).
//
// A worker is a group of lanes that keeps one row of y in registers and walks the row's nonzeros (or those of a piece
// of it), eight at a time: sources gathered with the widest loads that every row is aligned to, 16 bytes or (41
// features) 4, which neighbouring lanes make of neighbouring values; eight partial sums a lane, and then one round of
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
  static constexpr int64_t slice_bytes = 256;
  static constexpr int64_t narrow_bytes = 64;  // rows that neighbouring workers are to write results of
  static constexpr int64_t wide_bytes = 512;
  static constexpr int64_t single_bytes = 8;  // rows that a thread reads at once
  static constexpr int in_flight = 32;        // registers of a lane for what it gathers
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
  int first;        // feature of the slice that a launch is for
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

// Nonzeros of a batch whose R vectors of `bytes` are in flight together: a power of two.
constexpr __host__ __device__ int fetched_of(int batch, int vectors, int bytes) {
  const int registers = vectors * (bytes < 4 ? 1 : bytes / 4);
  while (batch > 1 && batch * registers > Config::in_flight) batch /= 2;
  return batch;
}

// Registers for as many blocks on a multiprocessor.
template <typename T, typename I, int N, int R>
constexpr int min_blocks = N * sizeof(T) < 16 && R * N * sizeof(T) > 16 ? 2
                           : R > 2                                      ? 3
                           : sizeof(T) != 4 || sizeof(I) != 4           ? 1
                                                                        : 2;

// L lanes to a worker, each with R vectors of N values of a row, or (LOOPS) of each of its slices, which it walks one
// after the other.
template <typename T, typename I, int N, int L, int R, bool LOOPS>
__global__ void __launch_bounds__(R > 2 ? Config::short_threads : kMaxListThreads, min_blocks<T, I, N, R>)
    dot_kernel(const Params<T, I> p) {
  constexpr int batch = Config::batch;
  constexpr int fetched = fetched_of(batch, R, N * sizeof(T));
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
  // Lanes past the end add nothing. With 16-byte loads they read the row's first vector instead, which takes fewer
  // registers; narrow loads are left out, and lie at fixed distances from one address.
  constexpr bool WHOLE = N * sizeof(T) == 16;
  const T* features = p.x;
  Pack<T, N> y[R];
  int offset[R];
  bool inside[R];
  auto start_at = [&](int first) {
    const int d = first + lane * N;
    if (!WHOLE) features = p.x + d;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int own = d + r * L * N;
      inside[r] = own < p.len;
      offset[r] = !WHOLE ? r * L * N : inside[r] ? own : 0;
      if (!WHOLE) y[r].raw = {};
      if (WHOLE || inside[r]) load(row_address(p.y, row, p.len) + (WHOLE ? offset[r] : own), y[r]);
    }
  };
  if constexpr (!LOOPS) start_at(p.first);
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
    Acc<T> sum[batch] = {};
    I sources[LOOPS ? batch : 1];
    auto source_of = [&](int j) { return __shfl_sync(~0u, own[j / L], j % L, L); };
    if constexpr (LOOPS) {
#pragma unroll
      for (int j = 0; j < batch; ++j) sources[j] = source_of(j);
    }
    auto take = [&](auto full) {
      constexpr bool FULL = decltype(full)::value;
#pragma unroll
      for (int first = 0; first < batch; first += fetched) {
        Pack<T, N> x[fetched][R];
#pragma unroll
        for (int u = 0; u < fetched; ++u) {
          const int j = first + u;
          const T* from = row_address(features, LOOPS ? sources[j % (LOOPS ? batch : 1)] : source_of(j), p.len);
#pragma unroll
          for (int r = 0; r < R; ++r) {
            if (!FULL) x[u][r].raw = {};
            if ((WHOLE || inside[r]) && (FULL || j < left)) load(from + offset[r], x[u][r]);
          }
        }
#pragma unroll
        for (int u = 0; u < fetched; ++u) {
#pragma unroll
          for (int r = 0; r < R; ++r) {
            Acc<T> dot = 0;
#pragma unroll
            for (int n = 0; n < N; ++n) dot += widen(x[u][r].values[n]) * widen(y[r].values[n]);
            if constexpr (WHOLE) {
              sum[first + u] += inside[r] ? dot : Acc<T>(0);  // a zero y would not do: x may be infinite
            } else if (inside[r]) {
              sum[first + u] += dot;
            }
          }
        }
      }
    };
    const bool full = __all_sync(~0u, left >= batch);
    int slice = 0;
    do {
      if constexpr (LOOPS) start_at(slice);
      if (full) {
        take(std::true_type{});
      } else {
        take(std::false_type{});
      }
      slice += L * R * N;
    } while (LOOPS && slice < p.len);
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

int64_t row_bytes(const DotCall& call) { return call.len * size_of(call.dtype); }

// Rows are long, and neighbours in the list share no sources: slices of 256 bytes, one after the other, keep a smaller
// table in the caches. reddit-like, 256 features, 11.3 ms instead of 17.9 for whole rows, though the sums are read and
// written again (H200). Not of 16-bit results, in which sums would lose their bits.
bool sliced(const DotCall& call) {
  const bool rounds = call.dtype == DType::bf16 || call.dtype == DType::f16;
  return row_bytes(call) > Config::slice_bytes && !call.work.clustered && !rounds &&
         call.graph.nnz / call.graph.num_rows >= Config::long_degree;
}

// Values of the widest load that fits all rows of both sides.
int values_of(const DotCall& call) {
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(call.x) | reinterpret_cast<uintptr_t>(call.y);
  const int size = size_of(call.dtype);
  for (int bytes : {16, size == 2 ? 4 : 8}) {
    if (bytes > size && call.len % (bytes / size) == 0 && addresses % bytes == 0) return bytes / size;
  }
  return 1;
}

// Calls f with the shape of workers as integral constants: lanes, vectors of each, and whether a row has more of them.
//
// Of 16 bytes. Several vectors to a lane mean more rows in flight and fewer shuffles. H200, 128 features, yeast-like
// (degree 2): 8 lanes of 4 take 0.64 ms, 16 of 2 take 0.82; 8 of 4 lose up to a tenth elsewhere.
template <typename F>
cudaError_t with_whole_shape(const DotCall& call, int64_t vectors, F f) {
  using std::integral_constant;
  auto shape = [&](auto lanes, auto own) { return f(lanes, own, std::false_type{}); };
  const integral_constant<int, 1> one;
  const integral_constant<int, 2> two;
  const integral_constant<int, 4> four;
  const integral_constant<int, 8> eight;
  if (vectors <= 4) return shape(four, one);
  if (vectors <= 8) return short_rows(call) ? shape(four, two) : shape(eight, one);
  if (vectors <= 16 || sliced(call)) return shape(eight, two);
  if (vectors <= 32) return short_rows(call) ? shape(eight, four) : shape(integral_constant<int, 16>{}, two);
  if (vectors <= 64) return shape(integral_constant<int, 32>{}, two);
  return f(integral_constant<int, 32>{}, one, std::true_type{});
}

// Of less. Lanes side by side should want a cache line or half of it, or each instruction asks for many lines with
// little of each; more vectors to a lane mean fewer instructions a nonzero. 41 floats: 16 lanes of three.
template <typename F>
cudaError_t with_narrow_shape(const DotCall& call, int64_t vectors, F f) {
  using std::integral_constant;
  auto shape = [&](auto lanes, auto own) { return f(lanes, own, std::false_type{}); };
  const integral_constant<int, 2> two;
  const integral_constant<int, 4> four;
  const integral_constant<int, 8> eight;
  const integral_constant<int, 16> sixteen;
  if (vectors <= 4) return shape(four, integral_constant<int, 1>{});
  if (vectors <= 8) return shape(four, two);
  if (vectors <= 16) return shape(eight, two);
  if (vectors <= 32) return shape(eight, four);
  if (vectors <= 48) return shape(sixteen, integral_constant<int, 3>{});
  if (vectors <= 64 || sliced(call)) return shape(sixteen, four);
  if (vectors <= 96) return shape(sixteen, integral_constant<int, 6>{});
  return f(integral_constant<int, 32>{}, two, std::true_type{});
}

// Calls f with the values of a load as well.
template <typename T, typename F>
cudaError_t with_shape(const DotCall& call, F f) {
  constexpr int whole = 16 / sizeof(T), half = sizeof(T) == 2 ? 2 : 8 / sizeof(T);
  const int values = values_of(call);
  auto narrow = [&](auto n) {
    return with_narrow_shape(call, call.len / n, [&](auto... shape) { return f(n, shape...); });
  };
  if (values == whole) {
    const std::integral_constant<int, whole> n;
    return with_whole_shape(call, call.len / n, [&](auto... shape) { return f(n, shape...); });
  }
  if constexpr (half > 1) {
    if (values == half) return narrow(std::integral_constant<int, half>{});
  }
  return narrow(std::integral_constant<int, 1>{});
}

}  // namespace

bool sddmm_rows_serves(const DotCall& call) {
  if (!call.work.items || row_bytes(call) <= Config::single_bytes) return false;
  // Left to sddmm_balanced.cu, whose neighbouring workers write neighbouring results: whole rows of two edges
  // (yeast-like D=256, 1.21 ms against 0.96), and 64 bytes of features in an order that scatters results
  // (products-like, 3.9 and 3.2).
  const int64_t degree = call.graph.nnz / call.graph.num_rows;
  if (short_rows(call)) {
    const int load_bytes = values_of(call) * size_of(call.dtype);
    const int64_t held =
        32 * balanced_loads(load_bytes) * load_bytes;  // 602 floats, H100: 2.4 ms, 4.0 by balanced ones
    return row_bytes(call) <= Config::wide_bytes || row_bytes(call) > held;
  }
  const bool scattered =
      call.graph.nnz >= Config::many_nonzeros && degree < Config::long_degree && !call.work.clustered;
  return row_bytes(call) > Config::narrow_bytes || !scattered;
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
    return with_shape<T>(call, [&](auto values, auto lanes, auto vectors, auto loops) {
      const int threads = vectors > 2 ? Config::short_threads : list_threads(call.graph);
      const unsigned blocks = static_cast<unsigned>(ceil_div(p.num_items, threads / lanes));
      for (p.first = 0; p.first < p.len; p.first += loops ? p.len : lanes * vectors * values) {
        p.accumulate = p.first > 0;
        dot_kernel<T, I, values, lanes, vectors, loops><<<blocks, threads, 0, stream>>>(p);
      }
      return cudaGetLastError();
    });
  });
}

}  // namespace cuda
}  // namespace gnnaccel
