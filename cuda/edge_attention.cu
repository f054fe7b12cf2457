// The forward of attention with given scores, by the kernel of additive attention (attention.cuh), which has them in
// place of sums of two nodes' scores. And the factors of edges as a tensor.
#include "attention.cuh"
#include "dot_attention.cuh"

namespace gnnaccel {
namespace cuda {

cudaError_t dot_attention_impl::given_forward(Workspace& workspace, const Csr& graph, const WorkList& work,
                                              const DotAttention& given, cudaStream_t stream) {
  const attention_impl::Shape shape = attention_impl::shape_of(graph, work, given.num_heads, given.width, given.dtype);
  const int64_t parts = rows_of<int32_t>(graph, work).num_parts;
  const int64_t values =
      attention_impl::piece_values(parts, shape, given.num_heads, given.width, attention_impl::Mode::given);
  void* const scratch = workspace.take(values * accumulator_size(given.dtype));
  return with_types(given.dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    auto p = attention_impl::params_of<T, I>(graph, work, shape, given.factor, 1, given.num_heads, given.width);
    p.x = static_cast<const T*>(given.value);
    p.given = static_cast<const T*>(given.edge_bias);
    p.out = static_cast<T*>(given.out);
    place_pieces(p, static_cast<Acc<T>*>(scratch), attention_impl::Mode::given);
    return attention_impl::launch<attention_impl::Mode::given>(p, shape, graph, stream);
  });
}

namespace {

template <typename T>
__global__ void __launch_bounds__(256) factor_kernel(const EdgeFactors<T> factor, T* out, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = narrow<T>(factor.of(i));
}

}  // namespace

cudaError_t edge_factor(const EdgeFactor& factor, void* out, int64_t count, DType dtype, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return with_types(dtype, IndexType::i32, [&](auto value, auto) {
    using T = decltype(value);
    factor_kernel<T><<<static_cast<unsigned>(ceil_div(count, 256)), 256, 0, stream>>>(EdgeFactors<T>(factor),
                                                                                      static_cast<T*>(out), count);
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace gnnaccel
