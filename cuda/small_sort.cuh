// A stable sort of positions by keys, for graphs that may be used once: one launch, where a radix sort takes eleven. On
// such a graph the host takes longer to ask for a launch than the GPU for what it does.
//
// A grid whose blocks are all there at once counts the keys, adds the counts up, puts the positions into their groups
// in whatever order threads come, and then brings each group into ascending order: a thread those of a few positions, a
// warp larger ones, and those of a hub a block by looking at every key, so that no graph takes long.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace small_sort_impl {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int64_t kMost = 1 << 20;  // keys and positions; more are sorted faster by radix (as many passes over each)
constexpr int kFew = 8;             // positions of a group that one thread orders
constexpr int kHub = 128;           // and from which on a block does
constexpr int kItems = 4;           // keys that a thread of it looks at together

// Scratch memory, all of int32.
struct Scratch {
  int* counts;  // [num_keys]
  int* keys;    // [count]: as they were when counted; the caller's may change meanwhile
  int* ranks;   // [count]: among equal keys, in no order
  int* places;  // [count]: positions by keys, in no order within a group
  int* sums;    // [blocks]: of the counts of a block's keys
  int* hubs;    // [count / kHub]: keys with more than kHub positions
  int* num_hubs;

  static int64_t bytes(int64_t count, int64_t num_keys, int64_t blocks) {
    return static_cast<int64_t>(sizeof(int)) * (num_keys + 3 * count + blocks + count / kHub + 1);
  }
  Scratch(void* workspace, int64_t count, int64_t num_keys, int64_t blocks)
      : counts(static_cast<int*>(workspace)),
        keys(counts + num_keys),
        ranks(keys + count),
        places(ranks + count),
        sums(places + count),
        hubs(sums + blocks),
        num_hubs(hubs + count / kHub) {}
};

// key(i): the key of position i. write(slot, i): says that position i comes at `slot`.
template <typename I, class Key, class Write>
__global__ void __launch_bounds__(kThreads)
    sort_kernel(Key key, int count, int num_keys, Scratch scratch, I* starts, Write write) {
  using Scan = cub::BlockScan<int, kThreads>;
  using Reduce = cub::BlockReduce<int, kThreads>;
  __shared__ union {
    typename Scan::TempStorage scan;
    typename Reduce::TempStorage reduce;
  } shared;
  __shared__ int before;
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  const int threads = static_cast<int>(gridDim.x) * kThreads;
  const int first = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);

  for (int k = first; k < num_keys; k += threads) scratch.counts[k] = 0;
  if (first == 0) *scratch.num_hubs = 0;
  grid.sync();

  for (int i = first; i < count; i += threads) {
    const int k = scratch.keys[i] = key(i);
    scratch.ranks[i] = atomicAdd(scratch.counts + k, 1);
  }
  grid.sync();

  // Where each group starts: every block adds up a run of keys, then all that come before it.
  const int run = (num_keys + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int from = static_cast<int>(blockIdx.x) * run, end = from + run, to = end < num_keys ? end : num_keys;
  int sum = 0;
  for (int k = from + static_cast<int>(threadIdx.x); k < to; k += kThreads) sum += scratch.counts[k];
  sum = Reduce(shared.reduce).Sum(sum);
  if (threadIdx.x == 0) scratch.sums[blockIdx.x] = sum;
  grid.sync();
  sum = 0;
  for (int b = static_cast<int>(threadIdx.x); b < static_cast<int>(blockIdx.x); b += kThreads) sum += scratch.sums[b];
  __syncthreads();
  sum = Reduce(shared.reduce).Sum(sum);
  if (threadIdx.x == 0) before = sum;
  __syncthreads();
  int offset = before;
  for (int tile = from; tile < to; tile += kThreads) {
    const int k = tile + static_cast<int>(threadIdx.x);
    const int own = k < to ? scratch.counts[k] : 0;
    int start, total;
    __syncthreads();
    Scan(shared.scan).ExclusiveSum(own, start, total);
    if (k < to) starts[k] = static_cast<I>(offset + start);
    if (own > kHub) scratch.hubs[atomicAdd(scratch.num_hubs, 1)] = k;
    offset += total;
  }
  if (first == 0) starts[num_keys] = static_cast<I>(count);
  grid.sync();

  for (int i = first; i < count; i += threads) {
    scratch.places[static_cast<int>(starts[scratch.keys[i]]) + scratch.ranks[i]] = i;
  }
  grid.sync();

  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  // `each`-th to last of a group by steps of `step`: to the slot that as many come before.
  auto order = [&](int start, int size, int each, int step) {
    for (int j = each; j < size; j += step) {
      const int i = scratch.places[start + j];
      int smaller = 0;
      for (int other = 0; other < size; ++other) smaller += scratch.places[start + other] < i;
      write(start + smaller, i);
    }
  };
  for (int base = first - lane; base < num_keys; base += threads) {
    const int k = base + lane;
    const int size = k < num_keys ? scratch.counts[k] : 0;
    const int start = size ? static_cast<int>(starts[k]) : 0;
    if (size <= kFew) order(start, size, 0, 1);
    for (unsigned left = __ballot_sync(~0u, size > kFew && size <= kHub); left; left &= left - 1) {
      const int owner = __ffs(left) - 1;
      order(__shfl_sync(~0u, start, owner), __shfl_sync(~0u, size, owner), lane, kWarp);
    }
  }
  const int num_hubs = *scratch.num_hubs;
  for (int h = static_cast<int>(blockIdx.x); h < num_hubs; h += static_cast<int>(gridDim.x)) {
    const int hub = scratch.hubs[h];
    int slot = static_cast<int>(starts[hub]);
    for (int tile = 0; tile < count; tile += kThreads * kItems) {
      const int mine = tile + static_cast<int>(threadIdx.x) * kItems;
      int found = 0;
      for (int item = 0; item < kItems; ++item) found += mine + item < count && scratch.keys[mine + item] == hub;
      int rank, total;
      __syncthreads();
      Scan(shared.scan).ExclusiveSum(found, rank, total);
      if (found) {
        for (int item = 0; item < kItems; ++item) {
          if (mine + item < count && scratch.keys[mine + item] == hub) write(slot + rank++, mine + item);
        }
      }
      slot += total;
    }
  }
}

}  // namespace small_sort_impl

inline bool is_small_sort(int64_t count, int64_t num_keys) {
  return count > 0 && std::max(count, num_keys) <= small_sort_impl::kMost;
}

// Sorts positions 0 .. count - 1 by key(i), in [0, num_keys), stably: starts [num_keys + 1] receives where each group
// starts, and write(slot, i) is called once for each.
template <typename I, class Key, class Write>
cudaError_t small_sort(Workspace& workspace, int64_t count, int64_t num_keys, I* starts, Key key, Write write,
                       cudaStream_t stream) {
  using namespace small_sort_impl;
  auto* kernel = sort_kernel<I, Key, Write>;
  int device = 0, multiprocessors = 0, resident = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (status == cudaSuccess) {
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, 0);
  }
  if (status != cudaSuccess) return status;
  const int64_t most = static_cast<int64_t>(multiprocessors) * std::min(resident, 4);  // more only wait for each other
  const int64_t blocks = std::max<int64_t>(1, std::min(most, ceil_div(std::max(count, num_keys), kThreads)));
  Scratch scratch(workspace.take(Scratch::bytes(count, num_keys, blocks)), count, num_keys, blocks);
  int narrow_count = static_cast<int>(count), narrow_keys = static_cast<int>(num_keys);
  void* arguments[] = {&key, &narrow_count, &narrow_keys, &scratch, &starts, &write};
  const dim3 grid(static_cast<unsigned>(blocks));
  status = cudaLaunchCooperativeKernel(kernel, grid, dim3(kThreads), arguments, 0, stream);
  return status == cudaSuccess ? cudaGetLastError() : status;
}

}  // namespace cuda
}  // namespace gnnaccel
