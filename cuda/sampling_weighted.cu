// Edges by weight. Without replacement those with the smallest keys, exponential ones whose rates are the weights, in
// their order: which is to draw one after the other, each by its weight among those left (Efraimidis and Spirakis,
// 2006). With replacement by sums of weights. A warp takes a row, a block of eight a long one; a row of more edges than
// a warp has lanes is gone through once for each 32 that it gets.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "sampling.cuh"

namespace gnnaccel {
namespace cuda {
namespace sample_impl {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int64_t kLong = 1024;    // edges of a row that is worth a block
constexpr int64_t kBlocks = 1024;  // for the long rows of a step

template <typename I>
__device__ __forceinline__ int64_t* long_rows(const Step<I>& given) {
  return given.sizes + given.max_rows;
}

// True for a row of which not all edges are taken.
template <typename I>
__device__ __forceinline__ bool is_drawn(const Step<I>& given, int64_t size) {
  return size > 0 && (given.replace || size > given.fanout);
}

// Edges of weight 0 are not drawn: a row has as many edges as there are others, if these are fewer. A warp looks at 32
// rows, one after the other.
template <typename I, typename W>
__global__ void __launch_bounds__(kThreads) count_kernel(Step<I> given, const W* weights) {
  const int lane = threadIdx.x % 32;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t own_count = i < given.max_rows ? given.offsets[i] : 0;
  const bool drawn = own_count > 0 && is_drawn(given, given.sizes[i]);
  const int64_t own_first = drawn ? given.firsts[i] : 0, own_size = drawn ? given.sizes[i] : 0;
  int64_t own_found = 0;
  for (unsigned left = __ballot_sync(~0u, drawn); left; left &= left - 1) {
    const int from = __ffs(left) - 1;
    const int64_t first = __shfl_sync(~0u, own_first, from), size = __shfl_sync(~0u, own_size, from);
    const int64_t count = __shfl_sync(~0u, own_count, from), enough = given.replace ? 1 : count;
    int64_t found = 0;
    for (int64_t start = 0; start < size && found < enough; start += 32) {
      const int64_t k = start + lane;
      found += __popc(__ballot_sync(~0u, k < size && weights[first + k] != 0));
    }
    if (lane == from) own_found = found < enough ? found : count;
  }
  if (!drawn) return;
  given.offsets[i] = own_found;
  if (own_found && own_size > kLong) {
    auto* const count = reinterpret_cast<unsigned long long*>(long_rows(given));
    long_rows(given)[1 + static_cast<int64_t>(atomicAdd(count, 1ull))] = i;
  }
}

__device__ __forceinline__ double unit(uint64_t row_seed, uint64_t counter) {  // in (0, 1]
  return static_cast<double>((splitmix64(row_seed, counter) >> 11) + 1) * 0x1p-53;
}

// A weight, or 0 for what is none.
template <typename I, typename W>
__device__ __forceinline__ double checked_weight(const Step<I>& given, const W* weights, int64_t k) {
  const double weight = weights[k];
  if (weight >= 0 && weight <= DBL_MAX) return weight;
  given.refuse(SampleError::weight, k);
  return 0;
}

// The smallest keys so far, ascending from lane to lane, and whose they are: numbers in a row.
template <typename I>
struct Smallest {
  double key = INFINITY;
  I edge = -1;

  // The same key by all lanes.
  __device__ __forceinline__ void insert(double more, I its) {
    const int lane = threadIdx.x % 32, at = __popc(__ballot_sync(~0u, key <= more));
    const double key_before = __shfl_up_sync(~0u, key, 1);
    const I edge_before = __shfl_up_sync(~0u, edge, 1);
    if (lane < at) return;
    key = lane == at ? more : key_before;
    edge = lane == at ? its : edge_before;
  }

  // Those of all lanes, in the order of the lanes; `worst`: the last key that counts, number `count`.
  __device__ __forceinline__ void insert_all(double more, I its, int count, double& worst) {
    for (unsigned left = __ballot_sync(~0u, more < worst); left; left &= left - 1) {
      const int from = __ffs(left) - 1;
      const double next = __shfl_sync(~0u, more, from);
      const I next_edge = __shfl_sync(~0u, its, from);
      if (next >= worst) continue;
      insert(next, next_edge);
      worst = __shfl_sync(~0u, key, count - 1);
    }
  }
};

// What warps of a block tell each other of a long row.
struct Shared {
  double keys[kWarps][32];
  int64_t edges[kWarps][32];
  double sums[kWarps];
  double last_key;
  int64_t last_edge;
};

// Where the edges of a row go, and the part of it that a warp of `warps` looks at.
template <typename I>
struct Drawn {
  I* to;
  int64_t first, size, count, low, high;
  uint64_t seed;

  __device__ __forceinline__ Drawn(const Step<I>& given, const Row& row, int warp, int warps)
      : to(given.edges + given.first_edge() + row.at),
        first(row.first),
        size(row.size),
        count(row.count),
        seed(row.seed) {
    const int64_t part = (size + warps - 1) / warps;
    low = part * warp < size ? part * warp : size;
    high = low + part < size ? low + part : size;
  }
};

template <int Warps, typename I, typename W>
__device__ void draw_distinct(const Step<I>& given, const Drawn<I>& row, const W* weights, Shared* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % Warps;
  double last_key = -1;  // of those that the rounds before have found
  int64_t last_edge = -1;
  for (int64_t done = 0; done < row.count; done += 32) {
    const int count = static_cast<int>(row.count - done < 32 ? row.count - done : 32);
    Smallest<I> best;
    double worst = INFINITY;
    for (int64_t start = row.low; start < row.high; start += 32) {
      const int64_t k = start + lane;
      double key = INFINITY;
      const double weight = k < row.high ? checked_weight(given, weights, row.first + k) : 0;
      if (weight > 0) {
        const double u = unit(row.seed, static_cast<uint64_t>(k));
        if (1 - u < worst * weight) {  // -log(u) is no less: most edges need no logarithm
          const double its = -log(u) / weight;
          key = its < DBL_MAX ? its : DBL_MAX;
        }
        if (key < last_key || (key == last_key && k <= last_edge)) key = INFINITY;
      }
      best.insert_all(key, static_cast<I>(k), count, worst);
    }
    if constexpr (Warps > 1) {
      shared->keys[warp][lane] = best.key;
      shared->edges[warp][lane] = best.edge;
      __syncthreads();
      if (warp == 0) {
        for (int other = 1; other < Warps; ++other)
          best.insert_all(shared->keys[other][lane], static_cast<I>(shared->edges[other][lane]), count, worst);
      }
    }
    if (warp == 0 && lane < count)
      row.to[done + lane] = best.edge < 0 ? static_cast<I>(-1) : static_cast<I>(row.first + best.edge);
    last_key = __shfl_sync(~0u, best.key, count - 1);
    last_edge = __shfl_sync(~0u, best.edge, count - 1);
    if constexpr (Warps > 1) {
      if (threadIdx.x == 0) {
        shared->last_key = last_key;
        shared->last_edge = last_edge;
      }
      __syncthreads();
      last_key = shared->last_key;
      last_edge = shared->last_edge;
    }
  }
}

__device__ __forceinline__ double sum_up_to(double value) {  // of this lane and those before
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int away = 1; away < 32; away *= 2) {
    const double before = __shfl_up_sync(~0u, value, away);
    if (lane >= away) value += before;
  }
  return value;
}

// A lane's target is found where the sum of weights first reaches it. Sums are rounded: a target beyond the last sum is
// of the last edge that has a weight, and no edge without one is taken.
template <int Warps, typename I, typename W>
__device__ void draw_again(const Step<I>& given, const Drawn<I>& row, const W* weights, Shared* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % Warps;
  double sum = 0;
  for (int64_t k = row.low + lane; k < row.high; k += 32) sum += checked_weight(given, weights, row.first + k);
  double total = __shfl_sync(~0u, sum_up_to(sum), 31), below = 0, own = total;
  if constexpr (Warps > 1) {
    if (lane == 0) shared->sums[warp] = total;
    __syncthreads();
    total = 0;
    for (int other = 0; other < Warps; ++other) {
      if (other == warp) below = total;
      total += shared->sums[other];
      if (other == warp) own = total;
    }
  }
  if (!isfinite(total)) {
    given.refuse(SampleError::weight_sum, 0);
    total = 0;
  }
  for (int64_t done = 0; done < row.count; done += 32) {
    const int64_t t = done + lane;
    const double target = unit(row.seed, static_cast<uint64_t>(t)) * total;
    // The first warp whose sum reaches it, if that is not of no weights at all.
    bool open = t < row.count && target <= own && own > 0 && !(target <= below && below > 0);
    double before = below;
    int64_t last = -1;
    for (int64_t start = row.low; start < row.high && __any_sync(~0u, open); start += 32) {
      const int64_t k = start + lane;
      const double weight = k < row.high ? static_cast<double>(weights[row.first + k]) : 0;
      const unsigned heavy = __ballot_sync(~0u, weight > 0);
      if (!heavy) continue;
      const double upto = before + sum_up_to(weight > 0 ? weight : 0);
      before = __shfl_sync(~0u, upto, 31);
      const int last_lane = 31 - __clz(static_cast<int>(heavy));
      for (unsigned here = __ballot_sync(~0u, open && target <= before); here; here &= here - 1) {
        const int from = __ffs(here) - 1;
        const double its = __shfl_sync(~0u, target, from);
        const unsigned reach = __ballot_sync(~0u, weight > 0 && upto >= its);
        if (lane == from) {
          row.to[t] = static_cast<I>(row.first + start + (reach ? __ffs(reach) - 1 : last_lane));
          open = false;
        }
      }
      last = start + last_lane;
    }
    if (open) row.to[t] = last < 0 ? static_cast<I>(-1) : static_cast<I>(row.first + last);
    if (t < row.count && total <= 0 && warp == 0) row.to[t] = static_cast<I>(-1);
  }
  if constexpr (Warps > 1) __syncthreads();
}

template <int Warps, typename I, typename W>
__device__ void draw_row(const Step<I>& given, const Row& row, const W* weights, Shared* shared) {
  const Drawn<I> drawn(given, row, static_cast<int>(threadIdx.x / 32 % Warps), Warps);
  if (given.replace) {
    draw_again<Warps>(given, drawn, weights, shared);
  } else {
    draw_distinct<Warps>(given, drawn, weights, shared);
  }
}

// Rows that are not long.
template <typename I, typename W>
__global__ void __launch_bounds__(kThreads) warps_kernel(Step<I> given, const W* weights, uint64_t seed) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const Row row(given, i, seed);
  if (row.count == 0 || row.at + row.count > given.max_edges) return;  // edges_kernel says what is wrong
  if (!is_drawn(given, row.size)) {
    I* const to = given.edges + given.first_edge() + row.at;
    for (int64_t k = threadIdx.x % 32; k < row.count; k += 32) to[k] = static_cast<I>(row.first + k);
  } else if (row.size <= kLong) {
    draw_row<1>(given, row, weights, nullptr);
  }
}

template <typename I, typename W>
__global__ void __launch_bounds__(kThreads) blocks_kernel(Step<I> given, const W* weights, uint64_t seed) {
  __shared__ Shared shared;
  const int64_t* const rows = long_rows(given);
  for (int64_t n = blockIdx.x; n < rows[0]; n += gridDim.x) {
    const Row row(given, rows[1 + n], seed);
    if (row.count && row.at + row.count <= given.max_edges) draw_row<kWarps>(given, row, weights, &shared);
  }
}

// Calls f(weights) in their type.
template <typename F>
cudaError_t with_weights(const SampleEdges& edges, F f) {
  if (edges.weight_type == DType::f64) return f(static_cast<const double*>(edges.weight));
  if (edges.weight_type == DType::f32) return f(static_cast<const float*>(edges.weight));
  return cudaErrorInvalidValue;
}

unsigned blocks_for(int64_t threads) { return static_cast<unsigned>(ceil_div(threads, kThreads)); }

}  // namespace

template <typename I>
cudaError_t count_weighted(const Step<I>& given, const SampleEdges& edges, cudaStream_t stream) {
  int64_t* const long_count = given.sizes + given.max_rows;
  const cudaError_t status = cudaMemsetAsync(long_count, 0, sizeof(int64_t), stream);
  if (status != cudaSuccess || given.max_rows == 0) return status;
  return with_weights(edges, [&](auto* weights) {
    count_kernel<<<blocks_for(given.max_rows), kThreads, 0, stream>>>(given, weights);
    return cudaGetLastError();
  });
}

template <typename I>
cudaError_t draw_weighted(const Step<I>& given, const SampleEdges& edges, uint64_t relation_seed, cudaStream_t stream) {
  if (given.max_rows == 0) return cudaSuccess;
  return with_weights(edges, [&](auto* weights) {
    warps_kernel<<<blocks_for(given.max_rows * 32), kThreads, 0, stream>>>(given, weights, relation_seed);
    const auto blocks = static_cast<unsigned>(std::min(given.max_rows, kBlocks));
    blocks_kernel<<<blocks, kThreads, 0, stream>>>(given, weights, relation_seed);
    return cudaGetLastError();
  });
}

template cudaError_t count_weighted(const Step<int32_t>&, const SampleEdges&, cudaStream_t);
template cudaError_t count_weighted(const Step<int64_t>&, const SampleEdges&, cudaStream_t);
template cudaError_t draw_weighted(const Step<int32_t>&, const SampleEdges&, uint64_t, cudaStream_t);
template cudaError_t draw_weighted(const Step<int64_t>&, const SampleEdges&, uint64_t, cudaStream_t);

}  // namespace sample_impl
}  // namespace cuda
}  // namespace gnnaccel
