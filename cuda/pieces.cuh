// Long rows whose pieces left their results in a workspace, merged in order.
#pragma once

#include <type_traits>

#include "rows.cuh"

namespace gnnaccel {
namespace cuda {

constexpr int kMergeThreads = 256;
constexpr int kWarpPieces = 64;  // a row of more is merged by a whole block

// A warp merges the pieces of one row for 32 features (blockIdx.y); one of many pieces is left to all warps of the
// block together, each taking every eighth. Job has a State of a feature, which starts from `clear`; `read` of a
// piece's; `add`, that takes in another one; and `write` of a row's.
template <typename I, typename Job>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const Rows<I> rows, int64_t width, const Job job) {
  using State = typename Job::State;
  constexpr int warps = kMergeThreads / 32;
  __shared__ State shared[warps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t d = static_cast<int64_t>(blockIdx.y) * 32 + lane;
  const bool active = d < width;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * warps;
  auto read = [&](const Pieces<I>& pieces, int64_t from, int64_t step) {
    State state;
    state.clear();
    for (int64_t j = from; active && j < pieces.count; j += step) job.add(state, job.read(pieces[j], d));
    return state;
  };
  const Pieces<I> own = pieces_of(rows, first + warp);
  if (active && own.count && own.count <= kWarpPieces) job.write(own, d, read(own, 0, 1));
  for (int64_t i = first; i < first + warps && i < rows.num_splits; ++i) {
    const Pieces<I> pieces = pieces_of(rows, i);
    if (pieces.count <= kWarpPieces) continue;
    const State mine = read(pieces, warp, warps);
    __syncthreads();  // the row before has been read
    shared[warp][lane] = mine;
    __syncthreads();
    if (warp) continue;
    State state = mine;
    for (int other = 1; other < warps; ++other) job.add(state, shared[other][lane]);
    if (active) job.write(pieces, d, state);
  }
}

template <typename I, typename Job>
cudaError_t merge_pieces(const Rows<I>& rows, int64_t width, const Job& job, cudaStream_t stream) {
  if (rows.num_splits == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(ceil_div(rows.num_splits, kMergeThreads / 32)),
                  static_cast<unsigned>(ceil_div(width, 32)));
  merge_kernel<<<grid, kMergeThreads, 0, stream>>>(rows, width, job);
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
