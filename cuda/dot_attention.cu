// Attention by inner products, and its forward; dot_attention.cuh holds the kernel.
#include "dot_attention.cuh"

namespace gnnaccel {
namespace cuda {

using namespace dot_attention_impl;

cudaError_t dot_attention(Workspace& workspace, const Csr& graph, const WorkList& work, const DotAttention& given,
                          cudaStream_t stream) {
  if (graph.num_rows == 0 || given.width == 0) return cudaSuccess;
  const bool forward = given.mode() == Mode::forward;
  if (!given.query) {
    return forward ? given_forward(workspace, graph, work, given, stream) : cudaErrorInvalidValue;
  }
  if (!fits(given)) return cudaErrorInvalidValue;
  void* const scratch = workspace.take(piece_values(graph, work, given) * accumulator_size(given.dtype));
  return forward ? solve<Mode::forward>(graph, work, given, scratch, stream)
                 : backward(graph, work, given, scratch, stream);
}

}  // namespace cuda
}  // namespace gnnaccel
