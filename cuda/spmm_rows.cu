// SpMM by rows of a work list: out[row] = sum, mean, max or min over the row's nonzeros of weight * x[source].
//
// A worker is a group of 4 to 32 lanes, 16 bytes of features each. It takes one item of the work list (a row, or
// one of the interleaved pieces of a long row, see WorkList) and keeps the row in registers; a lane loads the
// index and the weight of one nonzero, shuffles hand them round, and four gathers are in flight before the first
// use. Pieces go to the workspace and are combined in a fixed order by a second kernel, launched where there are any.
//
// The order of the list makes the caches work. Rows of equal length next to each other run through their sorted
// sources in step, so that the workers of a multiprocessor (and all of them in L2) want the same sources at about
// the same time; rows of one community share them besides. Slices of the features go one after the other
// (blockIdx.y), so that the slice's part of x has a chance to stay in L2. H200, reddit-like, 32 features: 1.40 ms by
// length, 1.17 by community and length (benchmarks/results/cuda_kernels_h200.csv); 1.66 as given, in a prototype.
//
// Rows at any address (41 features): the same with as many values to a lane, L features apart, in loads of one value,
// of which neighbouring lanes read neighbouring ones.
//
// Sub-warp per row with 16-byte lanes: Sputnik (Gale et al., 2020); rows by length: GE-SpMM, RoDe; clusters:
// HP-SpMM (Fan et al.).
#include "spmm_list.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

template <typename T, typename I, int L, Weight WEIGHT, bool EXTREME, bool SPREAD>
__global__ void __launch_bounds__(kMaxListThreads, min_blocks<T, I, L, WEIGHT, EXTREME, SPREAD>)
    rows_kernel(const ListParams<T, I> p) {
  constexpr int N = 16 / sizeof(T);
  const int lane = threadIdx.x % L;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (blockDim.x / L) + threadIdx.x / L;
  const int64_t slice = static_cast<int64_t>(blockIdx.y) * L;
  const int64_t feature = SPREAD ? slice * N + lane : (slice + lane) * N;
  // Lanes past the end repeat the slice's first, whose line others read too, and write nothing.
  const int64_t d = SPREAD || feature < p.num_feats ? feature : slice * N;
  I begin = 0, end = 0, skip = 0;  // skip: nonzeros of the row's other pieces between two runs of this one
  if (i < p.num_items) {
    const Item<I> item = load_item(p.items + i);
    begin = item.begin;
    end = item.end;
    if (item.part) skip = __ldg(p.steps + item.part - 1) - kPieceRun;
  }
  auto result = walk<L, WEIGHT, EXTREME, true, SPREAD>(p, begin, end, skip, lane, d);
  if (i >= p.num_items || feature >= p.num_feats) return;
  const Item<I> item = load_item(p.items + i);  // again: it would have cost registers all the while
  if (item.part) {
    result.write_part(p.parts, item.part - 1, d, p.num_feats);
  } else {
    result.template write<WEIGHT == Weight::fused>(p, item.row, d, item.end - item.begin);
  }
}

// All kernels of a call, by whether it is a max or min.
template <typename T, typename I, bool EXTREME>
cudaError_t launch(const SpmmCall& call, Slice slice, const ListParams<T, I>& p, cudaStream_t stream) {
  const cudaError_t status = with_shape<16>(slice.lanes, weight_of(call), [&](auto lanes, auto weight) {
    const int threads = list_threads(call.graph);
    const int64_t blocks = ceil_div(p.num_items, threads / lanes);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(slice.slices));
    if constexpr (EXTREME && weight == Weight::fused) {
      return cudaErrorInvalidValue;  // of sums alone
    } else if (!slice.spread) {
      rows_kernel<T, I, lanes, weight, EXTREME, false><<<grid, threads, 0, stream>>>(p);
      return cudaGetLastError();
    } else if constexpr (weight == Weight::heads) {
      return cudaErrorInvalidValue;  // of one weight for all features of a lane
    } else {
      rows_kernel<T, I, lanes, weight, EXTREME, true><<<grid, threads, 0, stream>>>(p);
      return cudaGetLastError();
    }
  });
  return status == cudaSuccess ? combine<EXTREME>(p, call.work, stream) : status;
}

}  // namespace

int64_t spmm_rows_workspace_bytes(const SpmmCall& call) {
  return call.work.num_parts * call.num_feats * call.part_bytes(sizeof(Position));
}

cudaError_t spmm_rows(const SpmmCall& call, Slice slice, cudaStream_t stream) {
  return with_types(call.dtype, call.graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    const ListParams<T, I> p = list_params_of<T, I>(call);
    return call.extreme() ? launch<T, I, true>(call, slice, p, stream) : launch<T, I, false>(call, slice, p, stream);
  });
}

}  // namespace cuda
}  // namespace gnnaccel
