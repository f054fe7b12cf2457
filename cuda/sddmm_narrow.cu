// SDDMM (dot) of one to four and of eight features: out[edge] = dot(x[source], y[row]).
//
// A thread takes a nonzero, and its neighbours the next ones, so that sources are read and results written side by
// side. The rows of a block's nonzeros come without a search of each: the rows that begin in the block mark where, and
// a running maximum spreads the marks, while the sources are under way. Balanced over nonzeros: HP-SDDMM (Fan et al.).
#include "sddmm.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 256;
  // Below these a thread has one nonzero, or two, else four: about as many blocks as a chip takes at once. H100, one
  // feature: 0.24 to 0.49M nonzeros 3 to 12 % slower with one than with two, 1M by 40 % than with four.
  static constexpr int64_t few_nonzeros = 200000, some_nonzeros = 700000;
  static constexpr int64_t even_most = 8, even_degree = 4;
  // In a block of more rows than this for each nonzero, nearly all without any, each nonzero looks for its own.
  static constexpr int most_rows = 8;
};

template <typename T, typename I>
struct Params {
  const I* indptr;
  const I* sources;  // row of x of each nonzero; null: the nonzero's own
  const I* edge_ids;
  int64_t num_rows;
  int64_t nnz;
  const T* x;
  const T* y;
  T* out;
};

template <typename T, typename I, int D, int ITEMS>
__global__ void __launch_bounds__(Config::threads) narrow_kernel(const Params<T, I> p) {
  constexpr int threads = Config::threads, warps = threads / 32, tile = threads * ITEMS, N = vector_of<T, D>;
  __shared__ int marks[tile];  // row of a nonzero, counted from the block's first
  __shared__ int tops[warps];
  __shared__ I ends[2];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tile;
  const int count = static_cast<int>(p.nnz - first < tile ? p.nnz - first : tile);
  // Two lanes read both halves of a row that takes two loads, and of the row of the other one: each load of a warp then
  // asks for half as many lines.
  constexpr bool HALVES = N > 1 && D / N == 2;
  const int half = threadIdx.x % 2;
  auto of_pair = [&](I own, I(&both)[2]) {
    const I other = __shfl_xor_sync(~0u, own, 1);
    both[0] = half ? other : own;
    both[1] = half ? own : other;
  };
  I source[ITEMS];
  Pack<T, N> x[ITEMS][D / N];
#pragma unroll
  for (int u = 0; u < ITEMS; ++u) {
    const int i = u * threads + threadIdx.x;
    marks[i] = 0;
    source[u] = 0;
    if (i < count) source[u] = p.sources ? __ldg(p.sources + first + i) : static_cast<I>(first + i);
  }
  if (warp < 2) {
    const I row = find_row_by_group<32>(p.indptr, p.num_rows, static_cast<I>(first + warp * (count - 1)));
    if (lane == 0) ends[warp] = row;
  }
  __syncthreads();
#pragma unroll
  for (int u = 0; u < ITEMS; ++u) {
    if constexpr (HALVES) {
      if (u * threads + warp * 32 >= count) continue;
      I both[2];
      of_pair(source[u], both);
#pragma unroll
      for (int h = 0; h < 2; ++h) load(row_address(p.x, both[h], D) + half * N, x[u][h]);
    } else {
      if (u * threads + static_cast<int>(threadIdx.x) < count) load_row<D>(p.x, source[u], x[u]);
    }
  }
  const int64_t first_row = ends[0], rows = ends[1] - first_row;
  const bool many = rows > Config::most_rows * tile;
  if (many) {
    for (int i = threadIdx.x; i < count; i += threads) {
      marks[i] = static_cast<int>(find_row(p.indptr, ends[1] + 1, first + i, first_row) - first_row);
    }
    __syncthreads();
  } else {
    for (int64_t i = threadIdx.x + 1; i <= rows; i += threads) {
      const I begin = __ldg(p.indptr + first_row + i);
      if (__ldg(p.indptr + first_row + i + 1) > begin) marks[begin - first] = static_cast<int>(i);
    }
    __syncthreads();
    int top[ITEMS], before = 0;  // of neighbouring nonzeros
#pragma unroll
    for (int u = 0; u < ITEMS; ++u) {
      top[u] = marks[threadIdx.x * ITEMS + u];
      if (u > 0 && top[u - 1] > top[u]) top[u] = top[u - 1];
    }
    int all = top[ITEMS - 1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, all, step);
      if (lane >= step && other > all) all = other;
    }
    if (lane == 31) tops[warp] = all;
    const int left = __shfl_up_sync(~0u, all, 1);
    if (lane > 0) before = left;
    __syncthreads();
    for (int w = 0; w < warp; ++w) before = tops[w] > before ? tops[w] : before;
#pragma unroll
    for (int u = 0; u < ITEMS; ++u) marks[threadIdx.x * ITEMS + u] = top[u] > before ? top[u] : before;
    __syncthreads();
  }
#pragma unroll
  for (int u = 0; u < ITEMS; ++u) {
    const int i = u * threads + threadIdx.x;
    Pack<T, N> y[D / N];
    Acc<T> sum = 0;
    if constexpr (HALVES) {
      if (u * threads + warp * 32 >= count) continue;
      Acc<T> of[2] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const I row = static_cast<I>(first_row + marks[i - half + h]);
        load(row_address(p.y, row, D) + half * N, y[h]);
#pragma unroll
        for (int n = 0; n < N; ++n) of[h] += widen(x[u][h].values[n]) * widen(y[h].values[n]);
      }
      sum = (half ? of[1] : of[0]) + __shfl_xor_sync(~0u, half ? of[0] : of[1], 1);
      if (i >= count) continue;
    } else {
      if (i >= count) continue;
      load_row<D>(p.y, static_cast<I>(first_row + marks[i]), y);
#pragma unroll
      for (int d = 0; d < D; ++d) sum += widen(x[u][d / N].values[d % N]) * widen(y[d / N].values[d % N]);
    }
    p.out[p.edge_ids ? static_cast<int64_t>(__ldg(p.edge_ids + first + i)) : first + i] = narrow<T>(sum);
  }
}

template <int D, typename T, typename I>
cudaError_t launch(const Params<T, I>& p, cudaStream_t stream) {
  auto run = [&](auto items) {
    const unsigned blocks = static_cast<unsigned>(ceil_div(p.nnz, Config::threads * items));
    narrow_kernel<T, I, D, items><<<blocks, Config::threads, 0, stream>>>(p);
    return cudaGetLastError();
  };
  if (p.nnz < Config::few_nonzeros) return run(std::integral_constant<int, 1>{});
  if (p.nnz < Config::some_nonzeros) return run(std::integral_constant<int, 2>{});
  return run(std::integral_constant<int, 4>{});
}

}  // namespace

bool sddmm_narrow_serves(const DotCall& call) {
  const int64_t size = size_of(call.dtype), bytes = row_alignment(call.len, size);
  if (call.len > 4 && (call.len != 8 || size > 4)) return false;
  // Where all rows nearly fill a batch of sddmm_rows.cu, that is faster: mesh-like (rows of 6), 8 features, 46 us
  // and 54.
  const bool even = call.work.items && call.work.longest <= Config::even_most &&
                    call.graph.nnz >= Config::even_degree * call.graph.num_rows;
  if (call.len > 2 && even) return false;
  return (reinterpret_cast<uintptr_t>(call.x) | reinterpret_cast<uintptr_t>(call.y)) % bytes == 0;
}

cudaError_t sddmm_narrow(const DotCall& call, cudaStream_t stream) {
  return with_types(call.dtype, call.graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p{};
    p.indptr = static_cast<const I*>(call.graph.indptr);
    p.edge_ids = static_cast<const I*>(call.graph.edge_ids);
    p.sources = call.x_by_edge ? p.edge_ids : static_cast<const I*>(call.graph.indices);
    p.num_rows = call.graph.num_rows;
    p.nnz = call.graph.nnz;
    p.x = static_cast<const T*>(call.x);
    p.y = static_cast<const T*>(call.y);
    p.out = static_cast<T*>(call.out);
    switch (call.len) {
      case 1:
        return launch<1>(p, stream);
      case 2:
        return launch<2>(p, stream);
      case 3:
        return launch<3>(p, stream);
      case 8:
        return launch<8>(p, stream);
      default:
        return launch<4>(p, stream);
    }
  });
}

}  // namespace cuda
}  // namespace gnnaccel
