// The CUDA half of ../cpp/kernels.h: the same names, the same arguments in the same order, a stream in place of
// the thread count. What an argument means is said there. In addition, here:
//   - pointers are device pointers of the current device; nothing is allocated, nothing synchronises, all work
//     goes to `stream` and can be captured in a CUDA graph;
//   - a kernel that needs scratch memory takes it as (workspace, workspace_bytes) before the stream, at least
//     as many bytes as its *_workspace_bytes function says, 16-byte aligned, contents irrelevant;
//   - results are the same bits on every run, except of scatter_arg where it says so;
//   - the return value is that of the launches.
#pragma once

#include <cuda_runtime_api.h>

#include "../cpp/types.h"

namespace gnnaccel {
namespace cuda {

int64_t spmm_workspace_bytes(int64_t nnz, int64_t num_feats, Reduce reduce, DType dtype, IndexType index_type);

cudaError_t spmm(const Csr& graph, const Operand& lhs, const Operand& rhs, void* out, void* arg_lhs, void* arg_rhs,
                 int64_t num_feats, Message message, Reduce reduce, DType dtype, double empty_value, void* workspace,
                 int64_t workspace_bytes, cudaStream_t stream);

cudaError_t sddmm(const Csr& graph, const Operand& lhs, Target lhs_target, const Operand& rhs, Target rhs_target,
                  void* out, int64_t num_feats, int64_t dot_len, EdgeOp op, DType dtype, cudaStream_t stream);

cudaError_t edge_softmax(const Csr& graph, const void* scores, void* out, int64_t num_heads, DType dtype,
                         cudaStream_t stream);

cudaError_t edge_softmax_backward(const Csr& graph, const void* out, const void* grad_out, void* grad_scores,
                                  int64_t num_heads, DType dtype, cudaStream_t stream);

// rows_disjoint: every target element is owned by one thread, same bits on every run. Otherwise atomics add in
// any order. f32 and f64 only, but for rows_disjoint with len == num_feats (where nothing is ever added twice):
// a 16-bit target would be rounded after each addition. cudaErrorInvalidValue for the rest.
cudaError_t scatter_arg(const void* arg, const void* values, void* target, int64_t num_rows, int64_t num_feats,
                        int64_t len, int64_t div, bool rows_disjoint, IndexType index_type, DType dtype,
                        cudaStream_t stream);

}  // namespace cuda
}  // namespace gnnaccel
