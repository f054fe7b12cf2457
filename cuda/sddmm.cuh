// Between the SDDMM kernels: sddmm (sddmm_balanced.cu) hands the dot products of training to sddmm_rows.
#pragma once

#include "common.cuh"

namespace gnnaccel {
namespace cuda {

// out[edge] = dot(x[source or edge], y[row]) by the items of a work list; len features a row, all 16-byte aligned.
struct DotCall {
  Csr graph;
  WorkList work;
  const void* x;
  bool x_by_edge;  // x has a row per edge; else one per source
  const void* y;
  void* out;
  int64_t len;
  DType dtype;
};

// Loads of a lane of a row that the kernel of sddmm_balanced.cu for neighbouring edges holds, by their bytes; wider
// rows it reads again for each edge.
constexpr int balanced_loads(int load_bytes) { return load_bytes == 16 ? 2 : 4; }

bool sddmm_rows_serves(const DotCall& call);
cudaError_t sddmm_rows(const DotCall& call, cudaStream_t stream);

// The same of one to four and of eight features, without a list (sddmm_narrow.cu).
bool sddmm_narrow_serves(const DotCall& call);
cudaError_t sddmm_narrow(const DotCall& call, cudaStream_t stream);

}  // namespace cuda
}  // namespace gnnaccel
