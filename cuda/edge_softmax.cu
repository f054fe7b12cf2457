// Softmax of edge scores over each row, and its backward.
//
// A team of threads holds one row: a power of two of lanes of a warp for short rows, sized to the mean degree,
// and a whole block for longer rows. Neighbouring lanes take neighbouring heads, the
// lanes of one head share its edges and reduce by shuffles, in a fixed order. The maximum starts at a true
// -inf, and exp is the accurate one.
#include <cmath>

#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 128;       // of a block of short rows: few rows wait for its longest
  static constexpr int long_threads = 512;  // of a block with one long row
  // Rows beyond this take a block: few enough on a large graph, short enough for a warp on a small one.
  static constexpr int64_t min_long_row = 512;
  static constexpr int64_t max_long_row = 4096;
  static constexpr int64_t target_blocks = 8192;
  static_assert(threads % 32 == 0 && long_threads % 32 == 0, "whole warps");
};

template <typename T, typename I>
struct Params {
  const I* indptr;
  const I* edge_ids;
  int64_t num_rows;
  int64_t nnz;
  const T* first;   // forward: scores; backward: the softmax
  const T* second;  // backward: its gradient
  T* out;
  int64_t num_heads;
  int64_t long_row;
  int lanes;  // of a short row's team
};

struct Max {
  template <typename A>
  __device__ __forceinline__ A operator()(A x, A y) const {
    return x > y ? x : y;  // a NaN score need not win here: its own exp spreads it over the row
  }
};
struct Plus {
  template <typename A>
  __device__ __forceinline__ A operator()(A x, A y) const {
    return x + y;
  }
};

// Reduces over the threads of a team whose index is equal modulo `heads` (a power of two, at most 32).
template <bool BLOCK, typename A, typename Op>
__device__ __forceinline__ A reduce(A x, int lanes, int heads, Op op) {
  for (int step = heads; step < (BLOCK ? 32 : lanes); step *= 2) x = op(x, __shfl_xor_sync(~0u, x, step));
  if constexpr (BLOCK) {
    constexpr int warps = Config::long_threads / 32;
    __shared__ A parts[warps][32];
    const int lane = threadIdx.x % 32;
    parts[threadIdx.x / 32][lane] = x;
    __syncthreads();
    x = parts[0][lane];
    for (int warp = 1; warp < warps; ++warp) x = op(x, parts[warp][lane]);
    __syncthreads();
  }
  return x;
}

// Nonzeros begin .. end - 1 of one row, by thread `member` of its team. All threads of the team's warps call
// this together; a team without a row passes begin == end.
template <bool BLOCK, bool BACKWARD, typename T, typename I>
__device__ __forceinline__ void solve_row(const Params<T, I>& p, int64_t begin, int64_t end, int member, int lanes,
                                          int heads) {
  using A = Acc<T>;
  const int step = lanes / heads;
  for (int64_t base = 0; base < p.num_heads; base += heads) {
    const int64_t head = base + member % heads;
    const int64_t start = head < p.num_heads ? begin + member / heads : end;
    auto at = [&](int64_t k) {
      return (p.edge_ids ? static_cast<int64_t>(__ldg(p.edge_ids + k)) : k) * p.num_heads + head;
    };
    if constexpr (BACKWARD) {
      A dot = 0;
#pragma unroll 4
      for (int64_t k = start; k < end; k += step) {
        const int64_t i = at(k);
        dot += widen(p.first[i]) * widen(p.second[i]);
      }
      dot = reduce<BLOCK>(dot, lanes, heads, Plus{});
#pragma unroll 4
      for (int64_t k = start; k < end; k += step) {
        const int64_t i = at(k);
        p.out[i] = narrow<T>(widen(p.first[i]) * (widen(p.second[i]) - dot));
      }
    } else {
      A top = -INFINITY;
#pragma unroll 4
      for (int64_t k = start; k < end; k += step) top = Max{}(widen(p.first[at(k)]), top);
      top = reduce<BLOCK>(top, lanes, heads, Max{});
      A sum = 0;
#pragma unroll 4
      for (int64_t k = start; k < end; k += step) sum += exp(widen(p.first[at(k)]) - top);
      sum = reduce<BLOCK>(sum, lanes, heads, Plus{});
#pragma unroll 4
      for (int64_t k = start; k < end; k += step) {
        const int64_t i = at(k);
        p.out[i] = narrow<T>(exp(widen(p.first[i]) - top) / sum);
      }
    }
  }
}

__host__ __device__ inline int heads_of_team(int64_t num_heads) {
  int heads = 1;
  while (heads < num_heads && heads < 32) heads *= 2;
  return heads;
}

// A row longer than long_row holds a multiple of long_row; the block of the first such one takes the row.
template <typename T, typename I, bool BACKWARD>
__global__ void __launch_bounds__(Config::long_threads) long_rows_kernel(const Params<T, I> p) {
  const int64_t k = static_cast<int64_t>(blockIdx.x) * p.long_row;
  const int64_t row = find_row_by_group<32>(p.indptr, p.num_rows, static_cast<I>(k));
  const int64_t begin = p.indptr[row], end = p.indptr[row + 1];
  if (end - begin <= p.long_row || k - begin >= p.long_row) return;
  solve_row<true, BACKWARD>(p, begin, end, threadIdx.x, Config::long_threads, heads_of_team(p.num_heads));
}

template <typename T, typename I, bool BACKWARD>
__global__ void __launch_bounds__(Config::threads) short_rows_kernel(const Params<T, I> p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (Config::threads / p.lanes) + threadIdx.x / p.lanes;
  int64_t begin = 0, end = 0;
  if (row < p.num_rows) {
    begin = p.indptr[row];
    end = p.indptr[row + 1];
    if (end - begin > p.long_row) end = begin;
  }
  solve_row<false, BACKWARD>(p, begin, end, threadIdx.x % p.lanes, p.lanes, heads_of_team(p.num_heads));
}

template <bool BACKWARD>
cudaError_t launch(const Csr& graph, const void* first, const void* second, void* out, int64_t num_heads, DType dtype,
                   cudaStream_t stream) {
  if (graph.nnz == 0 || num_heads == 0) return cudaSuccess;
  return with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p{};
    p.indptr = static_cast<const I*>(graph.indptr);
    p.edge_ids = static_cast<const I*>(graph.edge_ids);
    p.num_rows = graph.num_rows;
    p.nnz = graph.nnz;
    p.first = static_cast<const T*>(first);
    p.second = static_cast<const T*>(second);
    p.out = static_cast<T*>(out);
    p.num_heads = num_heads;
    const int64_t lanes = next_power_of_two(ceil_div(graph.nnz, graph.num_rows)) * heads_of_team(num_heads);
    p.lanes = static_cast<int>(lanes < 32 ? lanes : 32);
    p.long_row = next_power_of_two(graph.nnz / Config::target_blocks);
    if (p.long_row < Config::min_long_row) p.long_row = Config::min_long_row;
    if (p.long_row > Config::max_long_row) p.long_row = Config::max_long_row;
    if (graph.nnz > p.long_row) {
      const unsigned blocks = static_cast<unsigned>(ceil_div(graph.nnz, p.long_row));
      long_rows_kernel<T, I, BACKWARD><<<blocks, Config::long_threads, 0, stream>>>(p);
    }
    const unsigned blocks = static_cast<unsigned>(ceil_div(graph.num_rows, Config::threads / p.lanes));
    short_rows_kernel<T, I, BACKWARD><<<blocks, Config::threads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t edge_softmax(const Csr& graph, const void* scores, void* out, int64_t num_heads, DType dtype,
                         cudaStream_t stream) {
  return launch<false>(graph, scores, nullptr, out, num_heads, dtype, stream);
}

cudaError_t edge_softmax_backward(const Csr& graph, const void* out, const void* grad_out, void* grad_scores,
                                  int64_t num_heads, DType dtype, cudaStream_t stream) {
  return launch<true>(graph, out, grad_out, grad_scores, num_heads, dtype, stream);
}

}  // namespace cuda
}  // namespace gnnaccel
