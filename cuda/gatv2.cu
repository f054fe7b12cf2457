// The edge scores of GATv2, and the sums over rows that are their gradients: formulas in ../cpp/gatv2.cpp.
//
// A worker is a group of 4 to 16 lanes, 16 bytes of features each, that takes a row, or a piece of a long one
// (rows.cuh) and gathers the features of its sources, which meet the row's own in registers. For the scores the lanes
// of a head meet at every nonzero; the sums stay in their lanes, and pieces meet in the workspace, to be added in
// order.
#include "rows.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 256;  // where no work list says otherwise
  static constexpr int max_lanes = 16;
  static constexpr int batch = 4;  // gathers of a lane in flight
};

template <typename T, typename I>
struct Params {
  Rows<I> rows;
  const I* indices;
  const I* edge_ids;
  const T* x;
  const T* y;
  const T* vectors;
  const Acc<T>* weights;
  T* out;
  T* sums;
  Acc<T>* products;
  Acc<T>* parts;           // [parts, width] of sums, in the workspace
  Acc<T>* parts_products;  // the same of products
  Acc<T> slope;
  int heads;
  int per_head;
  int width;
  int heads_per_slice;  // of the scores' kernel
};

template <typename T>
__device__ __forceinline__ Acc<T> leaky(Acc<T> x, Acc<T> slope) {
  return x > 0 ? x : x * slope;
}

// What the kernels have in common: a tile of L nonzeros at a time, of which the lanes hold the sources and edge ids.
// each(first, left, source, edge) takes nonzeros first .. first + batch - 1 of the tile, those of them before `left`.
template <int L, typename T, typename I, typename F>
__device__ __forceinline__ void for_batches(const Params<T, I>& p, const Span<I>& span, int lane, F each) {
  static_assert(L >= Config::batch && kPieceRun % L == 0, "a tile lies in one run of its piece");
  I k = span.begin;
  const I end = span.end;
  auto load_source = [&]() { return lane < end - k ? __ldg(p.indices + k + lane) : I{0}; };
  I next_source = load_source();
#pragma unroll 1
  while (__any_sync(~0u, k < end)) {
    const I left = end - k, source = next_source;
    I edge = k + lane;
    if (p.edge_ids && lane < left) edge = __ldg(p.edge_ids + edge);
    const I next = (k + L - span.begin) % kPieceRun ? L : L + span.skip;
    k = left > next ? k + next : end;
    next_source = load_source();
#pragma unroll 1
    for (int first = 0; first < L && __any_sync(~0u, first < left); first += Config::batch) {
      each(first, left, source, edge);
    }
  }
}

// Whole heads to a worker. LONG: a head has more vectors than lanes, which take them in turns.
template <typename T, typename I, int L, bool LONG>
__global__ void __launch_bounds__(kMaxListThreads) scores_kernel(const Params<T, I> p) {
  using A = Acc<T>;
  constexpr int N = 16 / sizeof(T), batch = Config::batch;
  const int lane = threadIdx.x % L, vectors = p.per_head / N;
  const int members = LONG ? L : vectors, member = lane % members, of_slice = lane / members;
  int head = blockIdx.y * p.heads_per_slice + of_slice;
  const bool active = of_slice < p.heads_per_slice && head < p.heads;
  if (!active) head = 0;
  const Span<I> span = span_of(p.rows, static_cast<int64_t>(blockIdx.x) * (blockDim.x / L) + threadIdx.x / L);
  const int d = head * p.per_head + member * N;
  const T* own = p.y + static_cast<int64_t>(span.row) * p.width;
  Pack<T, N> y, vector;
  y.raw = vector.raw = {};
  if (span.present) load(own + d, y);
  load(p.vectors + d, vector);
  auto dot = [&](const Pack<T, N>& x, const Pack<T, N>& y, const Pack<T, N>& vector) {
    A sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sum += leaky<T>(widen(x.values[i]) + widen(y.values[i]), p.slope) * widen(vector.values[i]);
    }
    return sum;
  };
  for_batches<L>(p, span, lane, [&](int first, I left, I source, I edge) {
    Pack<T, N> x[batch];
    A score[batch];
    I from[batch];
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      from[u] = __shfl_sync(~0u, source, first + u, L);
      x[u].raw = {};
      if (first + u < left) load(row_address(p.x + d, from[u], p.width), x[u]);
    }
#pragma unroll
    for (int u = 0; u < batch; ++u) score[u] = dot(x[u], y, vector);
    if constexpr (LONG) {
      for (int v = member + L; v < vectors; v += L) {
        const int at = head * p.per_head + v * N;
        Pack<T, N> more_y, more_vector;
        load(own + at, more_y);
        load(p.vectors + at, more_vector);
#pragma unroll
        for (int u = 0; u < batch; ++u) {
          x[u].raw = {};
          if (first + u < left) load(row_address(p.x + at, from[u], p.width), x[u]);
        }
#pragma unroll
        for (int u = 0; u < batch; ++u) score[u] += dot(x[u], more_y, more_vector);
      }
    }
#pragma unroll
    for (int u = 0; u < batch; ++u) {
#pragma unroll
      for (int step = 1; step < L; step *= 2) {  // the lanes of a head meet in its first
        const A other = __shfl_sync(~0u, score[u], (lane + step) % L, L);
        if (member + step < members && lane + step < L) score[u] += other;
      }
      const I id = __shfl_sync(~0u, edge, first + u, L);
      if (active && member == 0 && first + u < left)
        p.out[static_cast<int64_t>(id) * p.heads + head] = narrow<T>(score[u]);
    }
  });
}

template <typename T, typename I, int L, bool PRODUCTS>
__global__ void __launch_bounds__(kMaxListThreads, sizeof(T) <= 4 && sizeof(I) == 4 ? 2 : 1)
    sums_kernel(const Params<T, I> p) {
  using A = Acc<T>;
  constexpr int N = 16 / sizeof(T), batch = Config::batch;
  const int lane = threadIdx.x % L;
  int d = (blockIdx.y * L + lane) * N;
  const bool active = d < p.width;
  if (!active) d = 0;  // these lanes repeat what others do, and write nothing
  const int head = d / p.per_head;
  const Span<I> span = span_of(p.rows, static_cast<int64_t>(blockIdx.x) * (blockDim.x / L) + threadIdx.x / L);
  Pack<T, N> y;
  y.raw = {};
  if (span.present) load(p.y + static_cast<int64_t>(span.row) * p.width + d, y);
  A sum[N], product[N];
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = product[i] = 0;
  for_batches<L>(p, span, lane, [&](int first, I left, I source, I edge) {
    Pack<T, N> x[batch];
    A weight[batch];
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      const I from = __shfl_sync(~0u, source, first + u, L), id = __shfl_sync(~0u, edge, first + u, L);
      x[u].raw = {};
      weight[u] = 0;
      if (first + u < left) {
        load(row_address(p.x + d, from, p.width), x[u]);
        weight[u] = load_one(p.weights + static_cast<int64_t>(id) * p.heads + head);
      }
    }
#pragma unroll
    for (int u = 0; u < batch; ++u) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A l = widen(x[u].values[i]) + widen(y.values[i]);
        const A share = l > 0 ? weight[u] : weight[u] * p.slope;
        sum[i] += share;
        if constexpr (PRODUCTS) product[i] += share * l;
      }
    }
  });
  if (!span.present || !active) return;
  if (span.part >= 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      p.parts[span.part * p.width + d + i] = sum[i];
      if constexpr (PRODUCTS) p.parts_products[span.part * p.width + d + i] = product[i];
    }
    return;
  }
  const int64_t at = static_cast<int64_t>(span.row) * p.width + d;
  Pack<T, N> vector, to;
  load(p.vectors + d, vector);
#pragma unroll
  for (int i = 0; i < N; ++i) to.values[i] = narrow<T>(sum[i] * widen(vector.values[i]));
  store(p.sums + at, to);
  if constexpr (PRODUCTS) {
#pragma unroll
    for (int i = 0; i < N; ++i) p.products[at + i] = product[i];
  }
}

// A block adds the pieces of one row, each warp a share of them, for 32 features (blockIdx.y).
template <typename T, typename I, bool PRODUCTS>
__global__ void __launch_bounds__(Config::threads) add_kernel(const Params<T, I> p) {
  using A = Acc<T>;
  constexpr int warps = Config::threads / 32;
  __shared__ double shared[2][warps][32];  // of a hub there are as many pieces as nonzeros of others
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int d = blockIdx.y * 32 + lane;
  const Pieces<I> pieces = pieces_of(p.rows, static_cast<int64_t>(blockIdx.x));
  if (pieces.count == 0) return;
  double sum = 0, product = 0;
  for (int64_t j = warp; d < p.width && j < pieces.count; j += warps) {
    sum += p.parts[pieces[j] * p.width + d];
    if constexpr (PRODUCTS) product += p.parts_products[pieces[j] * p.width + d];
  }
  shared[0][warp][lane] = sum;
  shared[1][warp][lane] = product;
  __syncthreads();
  if (warp || d >= p.width) return;
  for (int other = 1; other < warps; ++other) {
    sum += shared[0][other][lane];
    product += shared[1][other][lane];
  }
  p.sums[pieces.row * p.width + d] = narrow<T>(static_cast<A>(sum) * load_one(p.vectors + d));
  if constexpr (PRODUCTS) p.products[pieces.row * p.width + d] = static_cast<A>(product);
}

template <typename T, typename I>
Params<T, I> params_of(const Csr& graph, const WorkList& work, const void* x, const void* y, const void* vectors,
                       double slope, int64_t num_heads, int64_t width) {
  Params<T, I> p{};
  p.rows = rows_of<I>(graph, work);
  p.indices = static_cast<const I*>(graph.indices);
  p.edge_ids = static_cast<const I*>(graph.edge_ids);
  p.x = static_cast<const T*>(x);
  p.y = static_cast<const T*>(y);
  p.vectors = static_cast<const T*>(vectors);
  p.slope = static_cast<Acc<T>>(slope);
  p.heads = static_cast<int>(num_heads);
  p.per_head = static_cast<int>(width / num_heads);
  p.width = static_cast<int>(width);
  return p;
}

int lanes_for(int64_t vectors) { return vectors <= 4 ? 4 : vectors <= 8 ? 8 : 16; }

// Calls f with 4, 8 or 16 as an integral constant.
template <typename F>
cudaError_t with_lanes(int lanes, F f) {
  using std::integral_constant;
  if (lanes == 4) return f(integral_constant<int, 4>{});
  if (lanes == 8) return f(integral_constant<int, 8>{});
  return f(integral_constant<int, 16>{});
}

template <typename I>
dim3 grid_of(const Rows<I>& rows, int threads, int lanes, int64_t slices) {
  return dim3(static_cast<unsigned>(ceil_div(rows.workers, threads / lanes)), static_cast<unsigned>(slices));
}

}  // namespace

cudaError_t gatv2_scores(const Csr& graph, const WorkList& work, const void* x, const void* y, const void* vectors,
                         void* out, double slope, int64_t num_heads, int64_t width, DType dtype, cudaStream_t stream) {
  if (graph.nnz == 0 || width == 0) return cudaSuccess;
  return with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p = params_of<T, I>(graph, work, x, y, vectors, slope, num_heads, width);
    p.out = static_cast<T*>(out);
    const int64_t vectors_per_head = p.per_head * static_cast<int64_t>(sizeof(T)) / 16;
    const int threads = p.rows.items ? list_threads(graph) : Config::threads;
    if (vectors_per_head > Config::max_lanes) {
      p.heads_per_slice = 1;
      const dim3 grid = grid_of(p.rows, threads, Config::max_lanes, num_heads);
      scores_kernel<T, I, Config::max_lanes, true><<<grid, threads, 0, stream>>>(p);
      return cudaGetLastError();
    }
    return with_lanes(lanes_for(vectors_per_head * num_heads), [&](auto lanes) {
      p.heads_per_slice = static_cast<int>(lanes / vectors_per_head);
      const dim3 grid = grid_of(p.rows, threads, lanes, ceil_div(num_heads, p.heads_per_slice));
      scores_kernel<T, I, lanes, false><<<grid, threads, 0, stream>>>(p);
      return cudaGetLastError();
    });
  });
}

cudaError_t gatv2_sums(Workspace& workspace, const Csr& graph, const WorkList& work, const void* x, const void* y,
                       const void* vectors, const void* weights, void* sums, void* products, double slope,
                       int64_t num_heads, int64_t width, DType dtype, cudaStream_t stream) {
  if (graph.num_rows == 0 || width == 0) return cudaSuccess;
  const int64_t parts = rows_of<int32_t>(graph, work).num_parts;
  void* const scratch = workspace.take(parts * width * (products ? 2 : 1) * accumulator_size(dtype));
  return with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p = params_of<T, I>(graph, work, x, y, vectors, slope, num_heads, width);
    p.weights = static_cast<const Acc<T>*>(weights);
    p.sums = static_cast<T*>(sums);
    p.products = static_cast<Acc<T>*>(products);
    p.parts = static_cast<Acc<T>*>(scratch);
    p.parts_products = p.parts + p.rows.num_parts * width;
    const int64_t vectors_of_row = width * static_cast<int64_t>(sizeof(T)) / 16;
    const int threads = p.rows.items ? list_threads(graph) : Config::threads;
    auto run = [&](auto with_products) {
      const cudaError_t status = with_lanes(lanes_for(vectors_of_row), [&](auto lanes) {
        const dim3 grid = grid_of(p.rows, threads, lanes, ceil_div(vectors_of_row, static_cast<int64_t>(lanes)));
        sums_kernel<T, I, lanes, with_products><<<grid, threads, 0, stream>>>(p);
        return cudaGetLastError();
      });
      if (status != cudaSuccess || p.rows.num_splits == 0) return status;
      const dim3 grid(static_cast<unsigned>(p.rows.num_splits), static_cast<unsigned>(ceil_div(width, 32)));
      add_kernel<T, I, with_products><<<grid, Config::threads, 0, stream>>>(p);
      return cudaGetLastError();
    };
    return products ? run(std::true_type{}) : run(std::false_type{});
  });
}

}  // namespace cuda
}  // namespace gnnaccel
