// The forward of additive attention; attention.cuh holds the kernels.
#include "attention.cuh"

namespace gnnaccel {
namespace cuda {

using namespace attention_impl;

cudaError_t attention(Workspace& workspace, const Csr& graph, const WorkList& work, const void* x,
                      const void* score_src, const void* score_dst, const EdgeFactor& factor, void* out, void* lse,
                      void* out_pos, void* p_pos, double slope, int64_t num_heads, int64_t width, DType dtype,
                      cudaStream_t stream) {
  if (graph.num_rows == 0 || width == 0) return cudaSuccess;
  const Shape shape = shape_of(graph, work, num_heads, width, dtype);
  const Mode mode = out_pos ? Mode::kept : Mode::forward;
  const int64_t parts = rows_of<int32_t>(graph, work).num_parts;
  void* const scratch = workspace.take(piece_values(parts, shape, num_heads, width, mode) * accumulator_size(dtype));
  return with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p = params_of<T, I>(graph, work, shape, factor, slope, num_heads, width);
    p.x = static_cast<const T*>(x);
    p.score = static_cast<const Acc<T>*>(score_src);
    p.own_score = static_cast<const Acc<T>*>(score_dst);
    p.out = static_cast<T*>(out);
    p.lse = static_cast<Acc<T>*>(lse);
    p.out_pos = static_cast<T*>(out_pos);
    p.p_pos = static_cast<Acc<T>*>(p_pos);
    place_pieces(p, static_cast<Acc<T>*>(scratch), mode);
    return mode == Mode::kept ? launch<Mode::kept>(p, shape, graph, stream)
                              : launch<Mode::forward>(p, shape, graph, stream);
  });
}

}  // namespace cuda
}  // namespace gnnaccel
