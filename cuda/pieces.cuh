// Long rows whose pieces left their results in a workspace, merged in order.
#pragma once

#include <type_traits>

#include "rows.cuh"

namespace gnnaccel {
namespace cuda {

// merge_rows, a slice for each blockIdx.y.
template <typename I, typename Job>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const Rows<I> rows, int64_t width, const Job job, int rows_of_block) {
  __shared__ typename Job::State shared[kMergeThreads / 32][32];
  merge_rows(rows, width, static_cast<int64_t>(blockIdx.y), job, shared, rows_of_block);
}

// That blocks of their own take in one wave. Of more, a wave costs more than the rows of many pieces that it spares:
// tolokers (3,773 rows of 4 pieces in the mean, 34 at most), attention of one head of 16 features 29 -> 36 us (H100).
constexpr int64_t kFewSplits = 1024;

template <typename I, typename Job>
cudaError_t merge_pieces(const Rows<I>& rows, int64_t width, const Job& job, cudaStream_t stream) {
  if (rows.num_splits == 0) return cudaSuccess;
  const int64_t slices = ceil_div(width, 32);
  const int rows_of_block = rows.num_splits * slices <= kFewSplits ? 1 : kMergeThreads / 32;
  const dim3 grid(static_cast<unsigned>(ceil_div(rows.num_splits, rows_of_block)), static_cast<unsigned>(slices));
  merge_kernel<<<grid, kMergeThreads, 0, stream>>>(rows, width, job, rows_of_block);
  return cudaGetLastError();
}

// The Job of sums: adds up what the pieces of a row left in p.parts, `width` numbers each, for p.write.
template <typename P>
struct SumsOfPieces {
  P p;
  int64_t width;
  struct State {
    double value;  // of a hub there are as many pieces as nonzeros of others
    __device__ __forceinline__ void clear() { value = 0; }
  };
  __device__ __forceinline__ State read(int64_t piece, int64_t d) const {
    return {static_cast<double>(p.parts[piece * width + d])};
  }
  __device__ __forceinline__ void add(State& state, const State& other) const { state.value += other.value; }
  template <typename I>
  __device__ __forceinline__ void write(const Pieces<I>& pieces, int64_t d, const State& state) const {
    p.write(pieces.row, d, static_cast<std::remove_pointer_t<decltype(P::parts)>>(state.value));
  }
};

template <typename P>
cudaError_t merge_sums(const P& p, int64_t width, cudaStream_t stream) {
  return merge_pieces(p.rows, width, SumsOfPieces<P>{p, width}, stream);
}

}  // namespace cuda
}  // namespace gnnaccel
