// SDDMM balanced over nonzeros: out[edge] = op(operand of its source, destination or own row).
//
// A block owns `tile` consecutive nonzeros, whatever rows they lie in, so a hub is spread like any other
// edges. The rows of the tile's nonzeros are found once, one binary search a thread, and kept in shared memory.
// Elementwise ops give each edge a group of 16-byte lanes over the features; dot gives each (edge, group) pair a
// power of two of lanes that sum by shuffles. Balance over nonzeros: HP-SDDMM (Fan et al.).
#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 256;
  static constexpr int tile = 256;  // nonzeros of a block
  static constexpr int max_lanes = 32;
  static constexpr int batch = 4;  // edges of a worker whose operands are in flight together
  static_assert(tile <= threads, "one thread finds one row");
};

template <typename T, typename I>
struct Params {
  const I* indptr;
  const I* indices;
  const I* edge_ids;
  int64_t num_rows;
  int64_t nnz;
  Operand lhs;
  Operand rhs;
  Target lhs_target;
  Target rhs_target;
  T* out;
  int64_t num_feats;
  int64_t dot_len;
  EdgeOp op;
  int lanes;

  bool __host__ __device__ needs(Target target) const {
    return (lhs.data && lhs_target == target) || (rhs.data && rhs_target == target);
  }
};

template <typename T, typename I>
__device__ __forceinline__ void find_rows(const Params<T, I>& p, int64_t first, I (&rows)[Config::tile]) {
  if (!p.needs(Target::v)) return;
  if (threadIdx.x < Config::tile && first + threadIdx.x < p.nnz) {
    rows[threadIdx.x] = static_cast<I>(find_row(p.indptr, p.num_rows, first + threadIdx.x));
  }
  __syncthreads();
}

template <typename T, typename I>
__device__ __forceinline__ int64_t edge_of(const Params<T, I>& p, int64_t k) {
  return p.edge_ids ? static_cast<int64_t>(__ldg(p.edge_ids + k)) : k;
}

template <typename T, typename I>
__device__ __forceinline__ int64_t target_row(const Params<T, I>& p, Target target, int64_t k, int64_t edge, I row) {
  return target == Target::u ? static_cast<int64_t>(__ldg(p.indices + k)) : target == Target::v ? row : edge;
}

template <typename A>
__device__ __forceinline__ A apply(EdgeOp op, A x, A y) {
  switch (op) {
    case EdgeOp::copy_lhs:
      return x;
    case EdgeOp::copy_rhs:
      return y;
    case EdgeOp::add:
      return x + y;
    case EdgeOp::sub:
      return x - y;
    case EdgeOp::div:
      return x / y;
    default:
      return x * y;
  }
}

template <typename T, typename I, int N>
__global__ void __launch_bounds__(Config::threads) elementwise_kernel(const Params<T, I> p) {
  __shared__ I rows[Config::tile];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Config::tile;
  const int count = static_cast<int>(p.nnz - first < Config::tile ? p.nnz - first : Config::tile);
  find_rows(p, first, rows);
  const int workers = Config::threads / p.lanes;
  const int worker = threadIdx.x / p.lanes;
  const int64_t d = (static_cast<int64_t>(blockIdx.y) * p.lanes + threadIdx.x % p.lanes) * N;
  if (worker >= workers || d >= p.num_feats) return;
  const Reader<T, N> lhs(p.lhs, d), rhs(p.rhs, d);
  for (int start = worker; start < count; start += Config::batch * workers) {
    Pack<T, N> x[Config::batch], y[Config::batch];
    int64_t edge[Config::batch];
#pragma unroll
    for (int u = 0; u < Config::batch; ++u) {
      const int i = start + u * workers;
      if (i >= count) break;
      edge[u] = edge_of(p, first + i);
      const I row = p.needs(Target::v) ? rows[i] : I{0};
      if (p.lhs.data) lhs.fetch(target_row(p, p.lhs_target, first + i, edge[u], row), x[u]);
      if (p.rhs.data) rhs.fetch(target_row(p, p.rhs_target, first + i, edge[u], row), y[u]);
    }
#pragma unroll
    for (int u = 0; u < Config::batch; ++u) {
      if (start + u * workers >= count) break;
      Pack<T, N> out;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const Acc<T> left = p.lhs.data ? lhs.value(x[u], j) : Acc<T>(0);
        const Acc<T> right = p.rhs.data ? rhs.value(y[u], j) : Acc<T>(0);
        out.values[j] = narrow<T>(apply(p.op, left, right));
      }
      store(p.out + edge[u] * p.num_feats + d, out);
    }
  }
}

// A worker of p.lanes (a power of two up to 32) threads sums one (edge, group) pair; groups are neighbours, so
// the heads of an edge are read together.
template <typename T, typename I, int N>
__global__ void __launch_bounds__(Config::threads) dot_kernel(const Params<T, I> p) {
  __shared__ I rows[Config::tile];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Config::tile;
  const int count = static_cast<int>(p.nnz - first < Config::tile ? p.nnz - first : Config::tile);
  find_rows(p, first, rows);
  const int lane = threadIdx.x % p.lanes;
  const int workers = Config::threads / p.lanes;
  const int64_t items = count * p.num_feats;
  // Every thread of a warp runs every iteration: the shuffles below want them all.
  for (int64_t start = threadIdx.x / p.lanes; start - threadIdx.x / p.lanes < items; start += Config::batch * workers) {
    Acc<T> sum[Config::batch];
    int64_t edge[Config::batch], group[Config::batch], left[Config::batch], right[Config::batch];
#pragma unroll
    for (int u = 0; u < Config::batch; ++u) {
      const int64_t item = start + u * workers;
      sum[u] = 0;
      if (item >= items) continue;
      const int i = static_cast<int>(p.num_feats == 1 ? item : item / p.num_feats);
      group[u] = item - i * p.num_feats;
      edge[u] = edge_of(p, first + i);
      const I row = p.needs(Target::v) ? rows[i] : I{0};
      left[u] = target_row(p, p.lhs_target, first + i, edge[u], row);
      right[u] = target_row(p, p.rhs_target, first + i, edge[u], row);
    }
    for (int64_t j = static_cast<int64_t>(lane) * N; j < p.dot_len; j += p.lanes * N) {
      Pack<T, N> x[Config::batch], y[Config::batch];
#pragma unroll
      for (int u = 0; u < Config::batch; ++u) {
        if (start + u * workers >= items) break;
        const int64_t d = group[u] * p.dot_len + j;
        Reader<T, N>(p.lhs, d).fetch(left[u], x[u]);
        Reader<T, N>(p.rhs, d).fetch(right[u], y[u]);
      }
      const Reader<T, N> lhs(p.lhs, 0), rhs(p.rhs, 0);
#pragma unroll
      for (int u = 0; u < Config::batch; ++u) {
        if (start + u * workers >= items) break;
#pragma unroll
        for (int i = 0; i < N; ++i) sum[u] += lhs.value(x[u], i) * rhs.value(y[u], i);
      }
    }
#pragma unroll
    for (int u = 0; u < Config::batch; ++u) {
      for (int step = p.lanes / 2; step; step /= 2) sum[u] += __shfl_xor_sync(~0u, sum[u], step);
      if (lane == 0 && start + u * workers < items) p.out[edge[u] * p.num_feats + group[u]] = narrow<T>(sum[u]);
    }
  }
}

template <typename T, typename I, int N>
cudaError_t launch(Params<T, I> p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(ceil_div(p.nnz, Config::tile));
  if (p.op == EdgeOp::dot) {
    const int64_t lanes = next_power_of_two(ceil_div(p.dot_len, N));
    p.lanes = static_cast<int>(lanes < Config::max_lanes ? lanes : Config::max_lanes);
    dot_kernel<T, I, N><<<blocks, Config::threads, 0, stream>>>(p);
    return cudaGetLastError();
  }
  const int64_t vectors = ceil_div(p.num_feats, N);
  const int64_t tiles = ceil_div(vectors, Config::max_lanes);
  p.lanes = static_cast<int>(ceil_div(vectors, tiles));
  elementwise_kernel<T, I, N><<<dim3(blocks, static_cast<unsigned>(tiles)), Config::threads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t sddmm(const Csr& graph, const Operand& lhs, Target lhs_target, const Operand& rhs, Target rhs_target,
                  void* out, int64_t num_feats, int64_t dot_len, EdgeOp op, DType dtype, cudaStream_t stream) {
  if (graph.nnz == 0 || num_feats == 0) return cudaSuccess;
  return with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    constexpr int n = 16 / sizeof(T);
    Params<T, I> p{};
    p.indptr = static_cast<const I*>(graph.indptr);
    p.indices = static_cast<const I*>(graph.indices);
    p.edge_ids = static_cast<const I*>(graph.edge_ids);
    p.num_rows = graph.num_rows;
    p.nnz = graph.nnz;
    p.lhs = op == EdgeOp::copy_rhs ? Operand{nullptr, 1, 1} : lhs;
    p.rhs = op == EdgeOp::copy_lhs ? Operand{nullptr, 1, 1} : rhs;
    p.lhs_target = lhs_target;
    p.rhs_target = rhs_target;
    p.out = static_cast<T*>(out);
    p.num_feats = num_feats;
    p.dot_len = dot_len;
    p.op = op;
    const bool aligned_out = num_feats % n == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
    const bool wide = (op == EdgeOp::dot ? dot_len % n == 0 : aligned_out) && fits(p.lhs, n, sizeof(T)) &&
                      fits(p.rhs, n, sizeof(T));
    return wide ? launch<T, I, n>(p, stream) : launch<T, I, 1>(p, stream);
  });
}

}  // namespace cuda
}  // namespace gnnaccel
