// The backward of attention by inner products, over rows and over columns: dot_attention.cuh holds the
// kernel but for a small one.
#include "dot_attention.cuh"

namespace gnnaccel {
namespace cuda {

using namespace dot_attention_impl;

namespace {

// Of one destination and head, by a group of L lanes.
template <typename T, int L>
__global__ void __launch_bounds__(Config::threads)
    ends_kernel(const T* out, const Acc<T>* stats, const T* grad_out, Acc<T>* ends, int64_t count, int per_head) {
  constexpr int N = 16 / sizeof(T);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (Config::threads / L) + threadIdx.x / L;
  Acc<T> delta = 0;
  for (int d = threadIdx.x % L * N; i < count && d < per_head; d += L * N) {
    Pack<T, N> a, b;
    load(out + i * per_head + d, a);
    load(grad_out + i * per_head + d, b);
    delta += dot(a, b);
  }
  delta = sum_of_lanes<L>(delta);
  if (i >= count || threadIdx.x % L) return;
  ends[4 * i] = stats[2 * i];
  ends[4 * i + 1] = stats[2 * i + 1];
  ends[4 * i + 2] = delta;
}

}  // namespace

cudaError_t dot_attention_ends(const void* out, const void* stats, const void* grad_out, void* ends, int64_t num_rows,
                               int64_t num_heads, int64_t width, DType dtype, cudaStream_t stream) {
  if (num_rows == 0 || width == 0) return cudaSuccess;
  return with_types(dtype, IndexType::i32, [&](auto value, auto) {
    using T = decltype(value);
    using A = Acc<T>;
    const int64_t count = num_rows * num_heads;
    const int per_head = static_cast<int>(width / num_heads);
    auto run = [&](auto lanes) {
      const unsigned blocks = static_cast<unsigned>(ceil_div(count, Config::threads / lanes));
      ends_kernel<T, lanes><<<blocks, Config::threads, 0, stream>>>(
          static_cast<const T*>(out), static_cast<const A*>(stats), static_cast<const T*>(grad_out),
          static_cast<A*>(ends), count, per_head);
      return cudaGetLastError();
    };
    return per_head * sizeof(T) > 64 ? run(std::integral_constant<int, 16>{}) : run(std::integral_constant<int, 4>{});
  });
}

cudaError_t dot_attention_impl::backward(const Csr& graph, const WorkList& work, const DotAttention& given,
                                         void* scratch, cudaStream_t stream) {
  return given.mode() == Mode::rows ? solve<Mode::rows>(graph, work, given, scratch, stream)
                                    : solve<Mode::columns>(graph, work, given, scratch, stream);
}

}  // namespace cuda
}  // namespace gnnaccel
