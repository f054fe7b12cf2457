// The forward of dot-product attention; dot_attention.cuh holds the kernel.
#include "dot_attention.cuh"

namespace gnnaccel {
namespace cuda {

using namespace dot_attention_impl;

int64_t dot_attention_workspace_bytes(const Csr& graph, const WorkList& work, int64_t num_heads, int64_t width,
                                      DType dtype) {
  if (graph.num_rows == 0 || width == 0) return 0;
  return piece_values(graph, work, num_heads, width, Mode::forward) * accumulator_size(dtype);
}

cudaError_t dot_attention(const Csr& graph, const WorkList& work, const void* query, const void* key, const void* value,
                          const void* edge_scale, void* out, void* stats, double scale, int64_t num_heads,
                          int64_t width, DType dtype, void* workspace, int64_t workspace_bytes, cudaStream_t stream) {
  if (graph.num_rows == 0 || width == 0) return cudaSuccess;
  if (workspace_bytes < dot_attention_workspace_bytes(graph, work, num_heads, width, dtype) ||
      width / num_heads * size_of(dtype) > 16 * Config::max_vectors) {
    return cudaErrorInvalidValue;
  }
  return with_types(dtype, graph.index_type, [&](auto value_type, auto index) {
    using T = decltype(value_type);
    using I = decltype(index);
    Params<T, I> p = params_of<T, I>(graph, work, edge_scale, scale, num_heads, width);
    p.first = static_cast<const T*>(key);
    p.second = static_cast<const T*>(value);
    p.own_first = static_cast<const T*>(query);
    p.sum_second = static_cast<T*>(out);
    p.stats_out = static_cast<Acc<T>*>(stats);
    place_pieces(p, workspace, Mode::forward);
    return launch<Mode::forward>(p, stream);
  });
}

}  // namespace cuda
}  // namespace gnnaccel
