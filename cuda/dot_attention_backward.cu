// The backward of dot-product attention: over the rows, then over the columns; dot_attention.cuh holds the kernel.
#include "dot_attention.cuh"

namespace gnnaccel {
namespace cuda {

using namespace dot_attention_impl;

int64_t dot_attention_backward_rows_workspace_bytes(const Csr& graph, const WorkList& work, int64_t num_heads,
                                                    int64_t width, DType dtype) {
  if (graph.num_rows == 0 || width == 0) return 0;
  return piece_values(graph, work, num_heads, width, Mode::rows) * accumulator_size(dtype);
}

cudaError_t dot_attention_backward_rows(const Csr& graph, const WorkList& work, const void* query, const void* key,
                                        const void* value, const void* edge_scale, const void* out, const void* lse,
                                        const void* grad_out, void* grad_query, void* ends, double scale,
                                        int64_t num_heads, int64_t width, DType dtype, void* workspace,
                                        int64_t workspace_bytes, cudaStream_t stream) {
  if (graph.num_rows == 0 || width == 0) return cudaSuccess;
  if (workspace_bytes < dot_attention_backward_rows_workspace_bytes(graph, work, num_heads, width, dtype) ||
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
    p.own_second = static_cast<const T*>(grad_out);
    p.result = static_cast<const T*>(out);
    p.lse = static_cast<const Acc<T>*>(lse);
    p.ends = static_cast<Acc<T>*>(ends);
    p.sum_first = static_cast<T*>(grad_query);
    place_pieces(p, workspace, Mode::rows);
    return launch<Mode::rows>(p, stream);
  });
}

int64_t dot_attention_backward_columns_workspace_bytes(const Csr& transposed, const WorkList& work, int64_t num_heads,
                                                       int64_t width, DType dtype) {
  if (transposed.num_rows == 0 || width == 0) return 0;
  return piece_values(transposed, work, num_heads, width, Mode::columns) * accumulator_size(dtype);
}

cudaError_t dot_attention_backward_columns(const Csr& transposed, const WorkList& work, const void* query,
                                           const void* key, const void* value, const void* edge_scale, const void* ends,
                                           const void* grad_out, void* grad_key, void* grad_value, double scale,
                                           int64_t num_heads, int64_t width, DType dtype, void* workspace,
                                           int64_t workspace_bytes, cudaStream_t stream) {
  if (transposed.num_rows == 0 || width == 0) return cudaSuccess;
  if (workspace_bytes < dot_attention_backward_columns_workspace_bytes(transposed, work, num_heads, width, dtype) ||
      width / num_heads * size_of(dtype) > 16 * Config::max_vectors) {
    return cudaErrorInvalidValue;
  }
  return with_types(dtype, transposed.index_type, [&](auto value_type, auto index) {
    using T = decltype(value_type);
    using I = decltype(index);
    Params<T, I> p = params_of<T, I>(transposed, work, edge_scale, scale, num_heads, width);
    p.first = static_cast<const T*>(query);
    p.second = static_cast<const T*>(grad_out);
    p.own_first = static_cast<const T*>(key);
    p.own_second = static_cast<const T*>(value);
    p.ends = const_cast<Acc<T>*>(static_cast<const Acc<T>*>(ends));
    p.sum_first = static_cast<T*>(grad_key);
    p.sum_second = static_cast<T*>(grad_value);
    place_pieces(p, workspace, Mode::columns);
    return launch<Mode::columns>(p, stream);
  });
}

}  // namespace cuda
}  // namespace gnnaccel
