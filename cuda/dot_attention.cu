// Attention by inner products, and its forward; dot_attention.cuh holds the kernel.
#include "dot_attention.cuh"

namespace gnnaccel {
namespace cuda {

using namespace dot_attention_impl;

int64_t dot_attention_workspace_bytes(const Csr& graph, const WorkList& work, const DotAttention& given) {
  if (graph.num_rows == 0 || given.width == 0) return 0;
  return given.query ? piece_values(graph, work, given) * accumulator_size(given.dtype)
                     : given_workspace_bytes(graph, work, given);
}

cudaError_t dot_attention(const Csr& graph, const WorkList& work, const DotAttention& given, void* workspace,
                          int64_t workspace_bytes, cudaStream_t stream) {
  if (graph.num_rows == 0 || given.width == 0) return cudaSuccess;
  const bool forward = given.mode() == Mode::forward;
  if (workspace_bytes < dot_attention_workspace_bytes(graph, work, given)) return cudaErrorInvalidValue;
  if (!given.query) {
    return forward ? given_forward(graph, work, given, workspace, stream) : cudaErrorInvalidValue;
  }
  if (!fits(given)) return cudaErrorInvalidValue;
  return forward ? solve<Mode::forward>(graph, work, given, workspace, stream)
                 : backward(graph, work, given, workspace, stream);
}

}  // namespace cuda
}  // namespace gnnaccel
