// SDDMM balanced over nonzeros: out[edge] = op(operand of its source, destination or own row). Serves every op, and
// needs nothing prepared; a dot along a work list goes to sddmm_rows.cu, one of few features to sddmm_narrow.cu.
//
// A block owns `tile` consecutive nonzeros, whatever rows they lie in, so a hub is spread like any other
// edges. The rows of the tile's nonzeros are found once and kept in shared memory.
// Elementwise ops give each edge a group of 16-byte lanes over the features. dot gives each (edge, group) pair a
// power of two of lanes that sum by shuffles, with the widest loads that all rows are aligned to; its common form
// (dot_rows_kernel) keeps the destination's row in registers and sums four edges with one set of shuffles. Balance over
// nonzeros: HP-SDDMM (Fan et al.).
#include <utility>

#include "sddmm.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 256;
  static constexpr int tile = 512;  // nonzeros of a block
  static constexpr int max_lanes = 32;
  static constexpr int batch = 4;  // edges of a worker whose operands are in flight together
  static_assert(threads >= 64 && tile % threads == 0, "find_rows wants two warps, the workers equal runs");
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
  int lanes;    // threads of a worker
  int segment;  // dot_rows_kernel: lanes of one group
  int heads;    // dot_rows_kernel: groups of one worker

  bool __host__ __device__ needs(Target target) const {
    return (lhs.data && lhs_target == target) || (rhs.data && rhs_target == target);
  }
};

template <typename T, typename I>
__device__ __forceinline__ void find_rows(const Params<T, I>& p, int64_t first, int count, I (&rows)[Config::tile]) {
  if (!p.needs(Target::v)) return;
  __shared__ int64_t ends[2];
  if (threadIdx.x < 64) {  // two warps find the rows of the first and the last nonzero
    const int side = threadIdx.x / 32;
    const int64_t row = find_row_by_group<32>(p.indptr, p.num_rows, static_cast<I>(first + side * (count - 1)));
    if (threadIdx.x % 32 == 0) ends[side] = row;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += Config::threads) {
    rows[i] = static_cast<I>(find_row(p.indptr, ends[1] + 1, first + i, ends[0]));
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
  find_rows(p, first, count, rows);
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

// Sums s[u], u < 4, over the `lanes` neighbouring lanes (a power of two). With four lanes or more, each step that
// halves the lanes first halves the sums: 2 + 1 shuffles instead of 8. Returns the sum of edge `which` of the
// four; `writes` tells whether this lane is the one to write it.
template <typename A>
__device__ __forceinline__ A sum_of_four(A (&s)[4], int lanes, int lane, int& which, bool& writes) {
  const int half = lanes / 2, quarter = lanes / 4;
  const bool high = lane & half, odd = lane & quarter;
  A a = high ? s[2] : s[0], b = high ? s[3] : s[1];
  a += __shfl_xor_sync(~0u, high ? s[0] : s[2], half);
  b += __shfl_xor_sync(~0u, high ? s[1] : s[3], half);
  A c = odd ? b : a;
  c += __shfl_xor_sync(~0u, odd ? a : b, quarter);
  for (int step = quarter / 2; step; step /= 2) c += __shfl_xor_sync(~0u, c, step);
  which = 2 * high + odd;
  writes = lane % quarter == 0;
  return c;
}

// The dot of training: rhs belongs to the destination, both operands are full rows of vectors of N. A worker takes a
// run of neighbouring nonzeros, so it keeps the destination's vectors in registers while the row lasts. Its lanes cover
// p.heads groups of p.segment lanes each; a lane holds R vectors of a group.
template <typename T, typename I, int N, int R>
__global__ void __launch_bounds__(Config::threads) dot_rows_kernel(const Params<T, I> p) {
  constexpr int batch = 4;
  __shared__ I rows[Config::tile];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Config::tile;
  const int count = static_cast<int>(p.nnz - first < Config::tile ? p.nnz - first : Config::tile);
  find_rows(p, first, count, rows);
  const int workers = Config::threads / p.lanes, run = Config::tile / workers;
  const int lane = threadIdx.x % p.lanes, inside = lane % p.segment;
  const int64_t group = static_cast<int64_t>(blockIdx.y) * p.heads + lane / p.segment;
  const int stride = static_cast<int>(p.num_feats * p.dot_len);
  const int vectors = static_cast<int>(p.dot_len / N);
  // Lanes without a vector read the row's first one instead and add nothing: loads without a branch stay in
  // flight together, and all lanes are there for the shuffles.
  bool active[R];
  int offset[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    active[r] = group < p.num_feats && inside + r * p.segment < vectors;
    offset[r] = active[r] ? static_cast<int>(group * p.dot_len) + (inside + r * p.segment) * N : 0;
  }
  auto read = [&](const void* from, I row, Pack<T, N>(&to)[R]) {
#pragma unroll
    for (int r = 0; r < R; ++r) load(row_address(static_cast<const T*>(from) + offset[r], row, stride), to[r]);
  };
  auto dot = [&](const Pack<T, N>(&x)[R], const Pack<T, N>(&y)[R]) {
    Acc<T> sum = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (!active[r]) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) sum += widen(x[r].values[i]) * widen(y[r].values[i]);
    }
    return sum;
  };
  const int begin = threadIdx.x / p.lanes * run;
  const int limit = count < begin + run ? count : begin + run;
  // A worker past the end works on the last nonzero, and writes nothing.
  auto clamped = [&](int i) { return i < limit ? i : limit > begin ? limit - 1 : count - 1; };
  I row_of_y = rows[clamped(begin)];
  Pack<T, N> y[R];
  read(p.rhs.data, row_of_y, y);
  I source[batch];
  auto sources_at = [&](int start) {
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      const int64_t k = first + clamped(start + u);
      source[u] = p.lhs_target == Target::u ? __ldg(p.indices + k) : static_cast<I>(edge_of(p, k));
    }
  };
  sources_at(begin);
  // Every worker of a warp goes round equally often: the shuffles below want all lanes.
#pragma unroll 1
  for (int start = begin; start - begin < run; start += batch) {
    Pack<T, N> x[batch][R];
    Acc<T> sum[batch];
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      read(p.lhs.data, source[u], x[u]);
    }
    sources_at(start + batch);  // they arrive while the rows do
    // Rows ascend: if the batch's last row is the one at hand, all are.
    const I last_row = rows[clamped(start + batch - 1)];
    if (last_row == row_of_y) {
#pragma unroll
      for (int u = 0; u < batch; ++u) sum[u] = dot(x[u], y);
    } else {
      Pack<T, N> z[batch][R];
#pragma unroll
      for (int u = 0; u < batch; ++u) read(p.rhs.data, rows[clamped(start + u)], z[u]);
#pragma unroll
      for (int u = 0; u < batch; ++u) sum[u] = dot(x[u], z[u]);
#pragma unroll
      for (int r = 0; r < R; ++r) y[r] = z[batch - 1][r];
      row_of_y = last_row;
    }
    const bool member = group < p.num_feats;
    if (p.segment >= 4) {
      int which;
      bool writes;
      const Acc<T> total = sum_of_four(sum, p.segment, inside, which, writes);
      const int i = start + which;
      if (writes && member && i < limit) {
        p.out[edge_of(p, first + i) * p.num_feats + group] = narrow<T>(total);
      }
      continue;
    }
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      const int i = start + u;
      if (p.segment == 2) sum[u] += __shfl_xor_sync(~0u, sum[u], 1);
      if (inside == 0 && member && i < limit) {
        p.out[edge_of(p, first + i) * p.num_feats + group] = narrow<T>(sum[u]);
      }
    }
  }
}

// Any other dot. A worker of p.lanes (a power of two up to 32) threads sums a few (edge, group) pairs at a time; groups
// are neighbours, so the heads of an edge are read together.
template <typename T, typename I, int N>
__global__ void __launch_bounds__(Config::threads) dot_kernel(const Params<T, I> p) {
  constexpr int batch = N * sizeof(T) == 16 ? 2 : Config::batch;
  __shared__ I rows[Config::tile];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Config::tile;
  const int count = static_cast<int>(p.nnz - first < Config::tile ? p.nnz - first : Config::tile);
  find_rows(p, first, count, rows);
  const int lane = threadIdx.x % p.lanes, worker = threadIdx.x / p.lanes;
  const int workers = Config::threads / p.lanes;
  const int64_t items = count * p.num_feats;
  // Every thread of a warp goes round equally often: the shuffles below want them all.
  for (int64_t base = 0; base < items; base += workers * batch) {
    int64_t edge[batch], left[batch], right[batch], group[batch];
    bool present[batch];
    Acc<T> sum[batch] = {};
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      const int64_t item = base + u * workers + worker;
      present[u] = item < items;
      const int i = present[u] ? static_cast<int>(p.num_feats == 1 ? item : item / p.num_feats) : 0;
      group[u] = present[u] ? item - i * p.num_feats : 0;
      edge[u] = edge_of(p, first + i);
      const I row = p.needs(Target::v) ? rows[i] : I{0};
      left[u] = target_row(p, p.lhs_target, first + i, edge[u], row);
      right[u] = target_row(p, p.rhs_target, first + i, edge[u], row);
    }
    for (int64_t j = static_cast<int64_t>(lane) * N; j < p.dot_len; j += p.lanes * N) {
      Pack<T, N> x[batch], y[batch];
#pragma unroll
      for (int u = 0; u < batch; ++u) {
        if (!present[u]) continue;
        Reader<T, N>(p.lhs, group[u] * p.dot_len + j).fetch(left[u], x[u]);
        Reader<T, N>(p.rhs, group[u] * p.dot_len + j).fetch(right[u], y[u]);
      }
#pragma unroll
      for (int u = 0; u < batch; ++u) {
        if (!present[u]) continue;
        const Reader<T, N> lhs(p.lhs, group[u] * p.dot_len + j), rhs(p.rhs, group[u] * p.dot_len + j);
#pragma unroll
        for (int n = 0; n < N; ++n) sum[u] += lhs.value(x[u], n) * rhs.value(y[u], n);
      }
    }
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      for (int step = p.lanes / 2; step; step /= 2) sum[u] += __shfl_xor_sync(~0u, sum[u], step);
      if (lane == 0 && present[u]) p.out[edge[u] * p.num_feats + group[u]] = narrow<T>(sum[u]);
    }
  }
}

// Launches dot_rows_kernel if it can serve p; false if it cannot.
template <typename T, typename I, int N>
bool launch_dot_rows(Params<T, I> p, unsigned blocks, cudaStream_t stream) {
  if (p.lhs_target == Target::v) {
    std::swap(p.lhs, p.rhs);
    std::swap(p.lhs_target, p.rhs_target);
  }
  const int64_t full = p.num_feats * p.dot_len, vectors = p.dot_len / N;
  const bool rows = p.lhs.len == full && p.rhs.len == full && p.lhs.div == 1 && p.rhs.div == 1;
  constexpr int most = balanced_loads(N * sizeof(T));
  if (!rows || p.rhs_target != Target::v || p.lhs_target == Target::v || vectors > 32 * most) return false;
  // Vectors of a lane. Of less than 16 bytes several where that leaves four lanes: fewer instructions for an edge.
  const int own = N * sizeof(T) == 16 ? (vectors > 32 ? 2 : 1) : vectors <= 4 ? 1 : vectors <= 8 ? 2 : most;
  p.segment = static_cast<int>(next_power_of_two(ceil_div(vectors, own)));
  // Several heads side by side in a worker, if that many lanes are there to fill.
  const int64_t heads = next_power_of_two(p.num_feats);
  p.heads = static_cast<int>(heads < 32 / p.segment ? heads : 32 / p.segment);
  p.lanes = p.segment * p.heads;
  const dim3 grid(blocks, static_cast<unsigned>(ceil_div(p.num_feats, p.heads)));
  if (own == 1) {
    dot_rows_kernel<T, I, N, 1><<<grid, Config::threads, 0, stream>>>(p);
  } else if (own == 2) {
    dot_rows_kernel<T, I, N, 2><<<grid, Config::threads, 0, stream>>>(p);
  } else if constexpr (most > 2) {
    dot_rows_kernel<T, I, N, most><<<grid, Config::threads, 0, stream>>>(p);
  }
  return true;
}

template <typename T, typename I, int N>
cudaError_t launch_dots(Params<T, I> p, unsigned blocks, cudaStream_t stream) {
  const bool single = N * sizeof(T) < 16 && p.num_feats * p.dot_len == N;  // what a thread reads at once
  if (!single && launch_dot_rows<T, I, N>(p, blocks, stream)) return cudaGetLastError();
  const int64_t lanes = next_power_of_two(ceil_div(p.dot_len, N));
  p.lanes = static_cast<int>(lanes < Config::max_lanes ? lanes : Config::max_lanes);
  dot_kernel<T, I, N><<<blocks, Config::threads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, typename I, int N>
cudaError_t launch_elementwise(Params<T, I> p, unsigned blocks, cudaStream_t stream) {
  const int64_t vectors = ceil_div(p.num_feats, N);
  const int64_t tiles = ceil_div(vectors, Config::max_lanes);
  p.lanes = static_cast<int>(ceil_div(vectors, tiles));
  elementwise_kernel<T, I, N><<<dim3(blocks, static_cast<unsigned>(tiles)), Config::threads, 0, stream>>>(p);
  return cudaGetLastError();
}

// With the widest loads that fit.
template <typename T, typename I>
cudaError_t launch(const Params<T, I>& p, cudaStream_t stream) {
  constexpr int n = 16 / sizeof(T), half = sizeof(T) == 2 ? 2 : 8 / sizeof(T);
  const unsigned blocks = static_cast<unsigned>(ceil_div(p.nnz, Config::tile));
  auto reads = [&](int values) { return fits(p.lhs, values, sizeof(T)) && fits(p.rhs, values, sizeof(T)); };
  if (p.op == EdgeOp::dot) {
    if (p.dot_len % n == 0 && reads(n)) return launch_dots<T, I, n>(p, blocks, stream);
    if constexpr (half > 1) {
      if (p.dot_len % half == 0 && reads(half)) return launch_dots<T, I, half>(p, blocks, stream);
    }
    return launch_dots<T, I, 1>(p, blocks, stream);
  }
  const bool aligned_out = p.num_feats % n == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  return aligned_out && reads(n) ? launch_elementwise<T, I, n>(p, blocks, stream)
                                 : launch_elementwise<T, I, 1>(p, blocks, stream);
}

}  // namespace

cudaError_t sddmm(const Csr& graph, const WorkList& work, const Operand& lhs, Target lhs_target, const Operand& rhs,
                  Target rhs_target, void* out, int64_t num_feats, int64_t dot_len, EdgeOp op, DType dtype,
                  cudaStream_t stream) {
  if (graph.nnz == 0 || num_feats == 0) return cudaSuccess;
  if (op == EdgeOp::dot && num_feats == 1 && (lhs_target == Target::v) != (rhs_target == Target::v)) {
    const bool transposed = lhs_target == Target::v;
    const Operand &x = transposed ? rhs : lhs, &y = transposed ? lhs : rhs;
    const bool by_edge = (transposed ? rhs_target : lhs_target) == Target::e;
    const DotCall call{graph, work, x.data, by_edge, y.data, out, dot_len, dtype};
    const bool whole = x.len == dot_len && y.len == dot_len && x.div == 1 && y.div == 1;
    if (whole && sddmm_narrow_serves(call)) return sddmm_narrow(call, stream);
    if (whole && sddmm_rows_serves(call)) return sddmm_rows(call, stream);
  }
  return with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
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
    return launch(p, stream);
  });
}

}  // namespace cuda
}  // namespace gnnaccel
