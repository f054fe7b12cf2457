// The backward of dot-product attention, over rows and over columns: dot_attention.cuh holds the kernel but for a small
// one.
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

int64_t dot_attention_backward_rows_workspace_bytes(const Csr& graph, const WorkList& work, int64_t num_heads,
                                                    int64_t width, DType dtype) {
  if (graph.num_rows == 0 || width == 0) return 0;
  return piece_values(graph, work, num_heads, width, Mode::rows) * accumulator_size(dtype);
}

cudaError_t dot_attention_backward_rows(const Csr& graph, const WorkList& work, const void* query, const void* key,
                                        const void* value, const void* edge_scale, const void* ends,
                                        const void* grad_out, void* grad_query, double scale, int64_t num_heads,
                                        int64_t width, DType dtype, void* workspace, int64_t workspace_bytes,
                                        cudaStream_t stream) {
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
    p.ends = static_cast<const Acc<T>*>(ends);
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
                                           const void* grad_out, void* grad_key, void* grad_value, void* grad_dots,
                                           double scale, int64_t num_heads, int64_t width, DType dtype, void* workspace,
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
    p.ends = static_cast<const Acc<T>*>(ends);
    p.grad_dots = static_cast<T*>(grad_dots);
    p.sum_first = static_cast<T*>(grad_key);
    p.sum_second = static_cast<T*>(grad_value);
    place_pieces(p, workspace, Mode::columns);
    return launch<Mode::columns>(p, stream);
  });
}

}  // namespace cuda
}  // namespace gnnaccel
