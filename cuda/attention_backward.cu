// The backward of additive attention, over the transposed graph; attention.cuh holds its kernels but for two small
// ones.
#include "attention.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

using namespace attention_impl;

// Of one destination and head, by a group of L lanes: what its edges will ask for (score, log-sum-exp and delta), and
// the gradient of its score.
template <typename T, int L>
__global__ void __launch_bounds__(Config::threads)
    ends_kernel(const T* out, const T* out_pos, const T* grad_out, const Acc<T>* score, const Acc<T>* lse,
                const Acc<T>* p_pos, Acc<T>* ends, Acc<T>* grad_score, Acc<T> slope, int64_t count, int per_head) {
  using A = Acc<T>;
  constexpr int N = 16 / sizeof(T);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (Config::threads / L) + threadIdx.x / L;
  A delta = 0, positive = 0;
  for (int d = threadIdx.x % L * N; i < count && d < per_head; d += L * N) {
    Pack<T, N> grad, all, kept;
    load(grad_out + i * per_head + d, grad);
    load(out + i * per_head + d, all);
    load(out_pos + i * per_head + d, kept);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      delta += widen(grad.values[n]) * widen(all.values[n]);
      positive += widen(grad.values[n]) * widen(kept.values[n]);
    }
  }
#pragma unroll
  for (int step = L / 2; step; step /= 2) {
    delta += __shfl_xor_sync(~0u, delta, step);
    positive += __shfl_xor_sync(~0u, positive, step);
  }
  if (i >= count || threadIdx.x % L) return;
  A* to = ends + 4 * i;
  to[0] = score[i];
  to[1] = lse[i];
  to[2] = delta;
  grad_score[i] = (1 - slope) * (positive - delta * p_pos[i]);
}

// The gradient of a score is the sum of what slices of its head have found.
template <typename A>
__global__ void __launch_bounds__(Config::threads)
    sum_shares_kernel(const A* shares, A* grad_score, int64_t count, int slices) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * Config::threads + threadIdx.x;
  if (i >= count) return;
  A sum = 0;
  for (int slice = 0; slice < slices; ++slice) sum += shares[slice * count + i];
  grad_score[i] = sum;
}

// `graph` is the transposed one: its columns are the destinations.
int64_t ends_values(const Csr& graph, int64_t num_heads) { return 4 * graph.num_cols * num_heads; }
int64_t share_values(const Csr& graph, const Shape& shape, int64_t num_heads) {
  return shape.slices_per_head == 1 ? 0 : shape.slices_per_head * graph.num_rows * num_heads;
}

}  // namespace

cudaError_t attention_backward(Workspace& workspace, const Csr& transposed, const WorkList& work, const void* x,
                               const void* score_src, const void* score_dst, const EdgeFactor& factor, const void* out,
                               const void* lse, const void* out_pos, const void* p_pos, const void* grad_out,
                               void* grad_x, void* grad_score_src, void* grad_score_dst, double slope,
                               int64_t num_heads, int64_t width, DType dtype, cudaStream_t stream) {
  if (width == 0) return cudaSuccess;
  const Shape shape = shape_of(transposed, work, num_heads, width, dtype);
  const int64_t parts = rows_of<int32_t>(transposed, work).num_parts;
  const int64_t values = ends_values(transposed, num_heads) + share_values(transposed, shape, num_heads) +
                         piece_values(parts, shape, num_heads, width, Mode::backward);
  void* const scratch = workspace.take(values * accumulator_size(dtype));
  return with_types(dtype, transposed.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    using A = Acc<T>;
    Params<T, I> p = params_of<T, I>(transposed, work, shape, factor, slope, num_heads, width);
    A* ends = static_cast<A*>(scratch);
    p.ends = ends;
    p.grad_shares = ends + ends_values(transposed, num_heads);
    place_pieces(p, p.grad_shares + share_values(transposed, shape, num_heads), Mode::backward);
    p.x = static_cast<const T*>(grad_out);
    p.own_score = static_cast<const A*>(score_src);
    p.y = static_cast<const T*>(x);
    p.out = static_cast<T*>(grad_x);
    p.grad_score = static_cast<A*>(grad_score_src);
    const int64_t destinations = transposed.num_cols * num_heads, sources = transposed.num_rows * num_heads;
    if (destinations) {
      auto prepare = [&](auto lanes) {
        const unsigned blocks = static_cast<unsigned>(ceil_div(destinations, Config::threads / lanes));
        ends_kernel<T, lanes><<<blocks, Config::threads, 0, stream>>>(
            static_cast<const T*>(out), static_cast<const T*>(out_pos), p.x, static_cast<const A*>(score_dst),
            static_cast<const A*>(lse), static_cast<const A*>(p_pos), ends, static_cast<A*>(grad_score_dst), p.slope,
            destinations, p.per_head);
      };
      const size_t bytes = p.per_head * sizeof(T);
      if (bytes > 64) {
        prepare(std::integral_constant<int, 16>{});
      } else if (bytes > 32) {
        prepare(std::integral_constant<int, 4>{});
      } else {
        prepare(std::integral_constant<int, 2>{});
      }
    }
    if (sources == 0) return cudaGetLastError();
    const cudaError_t status = launch<Mode::backward>(p, shape, transposed, stream);
    if (status != cudaSuccess || shape.slices_per_head == 1) return status;
    const unsigned blocks = static_cast<unsigned>(ceil_div(sources, Config::threads));
    sum_shares_kernel<A>
        <<<blocks, Config::threads, 0, stream>>>(p.grad_shares, p.grad_score, sources, shape.slices_per_head);
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace gnnaccel
