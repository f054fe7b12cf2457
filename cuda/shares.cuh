// What the blocks of a kernel leave of sums over many rows, added up in a fixed order.
#pragma once

#include "common.cuh"

namespace gnnaccel {
namespace cuda {

constexpr int kShareWarps = 32;       // of a block that adds up shares
constexpr int64_t kMostShares = 512;  // blocks of rows that leave one,
constexpr int64_t kLeastRows = 32;    // each of so many rows at least, and at most as f32 can add up a thread's share
constexpr int64_t kMostRows = 1024;

inline int64_t blocks_of_rows(int64_t num_rows) {
  const int64_t blocks = ceil_div(num_rows, kLeastRows), least = ceil_div(num_rows, kMostRows);
  return blocks < kMostShares ? blocks : least > kMostShares ? least : kMostShares;
}

// What the threads of a block have of sums over its rows: N columns each, every `columns`-th thread of the same ones.
// All threads of the block call it; write(column, i, sum) for the i-th value of a group of columns.
template <int THREADS, int N, typename A, typename F>
__device__ __forceinline__ void sum_members(A (&shared)[THREADS][N], const A (&own)[N], int columns, F write) {
#pragma unroll
  for (int n = 0; n < N; ++n) shared[threadIdx.x][n] = own[n];
  __syncthreads();
  const int members = THREADS / columns;
  for (int at = threadIdx.x; at < columns * N; at += THREADS) {
    const int column = at / N, i = at % N;
    A sum = shared[column][i];
#pragma unroll 8
    for (int other = 1; other < members; ++other) sum += shared[other * columns + column][i];
    write(column, i, sum);
  }
}

// out [count] = the sum of shares [blocks, count]: 32 values to a block; each of its warps adds up every so-manyeth
// share of them.
template <typename A>
__global__ void __launch_bounds__(kShareWarps * 32) sum_kernel(const A* shares, A* out, int count, int blocks) {
  __shared__ double shared[kShareWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = static_cast<int>(blockIdx.x) * 32 + lane;
  double sum = 0;
#pragma unroll 8
  for (int64_t block = warp; i < count && block < blocks; block += kShareWarps) sum += shares[block * count + i];
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp || i >= count) return;
  for (int other = 1; other < kShareWarps; ++other) sum += shared[other][lane];
  out[i] = static_cast<A>(sum);
}

template <typename A>
cudaError_t sum_shares(const A* shares, A* out, int count, int64_t blocks, cudaStream_t stream) {
  sum_kernel<A><<<static_cast<unsigned>(ceil_div(count, 32)), kShareWarps * 32, 0, stream>>>(shares, out, count,
                                                                                             static_cast<int>(blocks));
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace gnnaccel
