// SpMM by groups of neighbours: GNNAdvisor's kernel (Wang et al., OSDI 2021, Algorithm 1), without its atomics.
//
// A row's nonzeros are cut into groups of about equal size, each the work of L lanes (the dimension workers) of 16
// bytes of features. A block has a fixed number of workers, and takes that many groups from the list, so that most
// groups of a row meet in one block: the first of them leads, and adds what the others left in shared memory, in their
// order. A row that goes on in the next block leaves a part in the workspace there and here; a second kernel adds
// these. Nothing is zero-filled, and the bits are the same on every run.
//
// Rows at any address: as in spmm_rows.cu.
//
// Which block a group falls into is settled when the list is made (gnnaccel/schedule/worklist.py), as the parts are
// numbered by it.
#include "spmm_list.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

// How many groups from the list's i-th on, of `most` in this block, are of `row`; for the lanes of a worker that
// `asks`.
template <int L, typename I>
__device__ __forceinline__ int groups_of_row(const Item<I>* items, int64_t i, int most, I row, bool asks) {
  const int lane = threadIdx.x % L;
  int count = 0;
  bool more = asks;
  while (__any_sync(~0u, more)) {
    const bool same = more && count + lane < most && __ldg(&items[i + count + lane].row) == row;
    const unsigned others = ~group_ballot<L>(same);
    const int run = others ? __ffs(others) - 1 : 32;
    count += run;
    more = more && run == L;
  }
  return count;
}

template <typename T, typename I, int L, Weight WEIGHT, bool SPREAD>
__global__ void __launch_bounds__(kMaxListThreads, min_blocks<T, I, L, WEIGHT, false, SPREAD>)
    groups_kernel(const ListParams<T, I> p, int workers) {
  constexpr int N = 16 / sizeof(T);
  using Row = LaneResult<T, L, false, SPREAD>;
  extern __shared__ int4 memory[];
  Row* left = reinterpret_cast<Row*>(memory);  // [workers, L], of those that do not lead
  const int lane = threadIdx.x % L, worker = threadIdx.x / L;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * workers, i = first + worker;
  const bool present = worker < workers && i < p.num_items;
  const int64_t slice = static_cast<int64_t>(blockIdx.y) * L;
  const int64_t feature = SPREAD ? slice * N + lane : (slice + lane) * N;
  // Lanes past the end repeat the slice's first, whose line others read too, and write nothing.
  const int64_t d = SPREAD || feature < p.num_feats ? feature : slice * N;
  I begin = 0, end = 0;
  if (present) {
    const Item<I> item = load_item(p.items + i);
    begin = item.begin;
    end = item.end;
  }
  Row sums = walk<L, WEIGHT, false, false, SPREAD>(p, begin, end, I{0}, lane, d);
  Item<I> item{};
  if (present) item = load_item(p.items + i);  // again: it would have cost registers all the while
  const bool follows = present && worker > 0 && __ldg(&p.items[i - 1].row) == item.row;
  if (follows) left[worker * L + lane] = sums;
  const int64_t rest = p.num_items - first < workers ? p.num_items - i : workers - worker;
  const int count = groups_of_row<L>(p.items, i, static_cast<int>(rest), item.row, present && !follows);
  __syncthreads();
  if (!present || follows || feature >= p.num_feats) return;
#pragma unroll 4
  for (int other = 1; other < count; ++other) sums.add(left[(worker + other) * L + lane]);
  if (item.part) {
    sums.write_part(p.parts, item.part - 1, d, p.num_feats);
  } else {
    const I row_end = count > 1 ? load_item(p.items + i + count - 1).end : item.end;
    sums.template write<WEIGHT == Weight::fused>(p, item.row, d, row_end - item.begin);
  }
}

}  // namespace

int64_t spmm_groups_workspace_bytes(const SpmmCall& call) {
  return call.work.num_parts * call.num_feats * call.part_bytes(sizeof(Position));
}

cudaError_t spmm_groups(const SpmmCall& call, Slice slice, cudaStream_t stream) {
  const int workers = call.work.workers;
  if (workers <= 0 || workers * slice.lanes > kMaxListThreads) return cudaErrorInvalidValue;
  return with_types(call.dtype, call.graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    const ListParams<T, I> p = list_params_of<T, I>(call);
    const cudaError_t status = with_shape<32>(slice.lanes, weight_of(call), [&](auto lanes, auto weight) {
      constexpr int row_bytes = lanes * static_cast<int>(sizeof(LaneResult<T, lanes, false, false>));
      const dim3 grid(static_cast<unsigned>(ceil_div(p.num_items, workers)), static_cast<unsigned>(slice.slices));
      const unsigned threads = static_cast<unsigned>(ceil_div(workers * lanes, 32) * 32);  // whole warps
      if (!slice.spread) {
        groups_kernel<T, I, lanes, weight, false><<<grid, threads, workers * row_bytes, stream>>>(p, workers);
        return cudaGetLastError();
      } else if constexpr (weight == Weight::heads || lanes > kMaxSpreadLanes) {
        return cudaErrorInvalidValue;  // of one weight for all features of a lane; not that wide
      } else {
        groups_kernel<T, I, lanes, weight, true><<<grid, threads, workers * row_bytes, stream>>>(p, workers);
        return cudaGetLastError();
      }
    });
    return status == cudaSuccess ? combine<false>(p, call.work, stream) : status;
  });
}

}  // namespace cuda
}  // namespace gnnaccel
