// From COO to CSR and from CSR to its transpose: a stable radix sort of (row, position) pairs over the bits that rows
// have, then the row starts by binary search and the gathers. The sort is CUB's.
#include "sort.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

using namespace sort_impl;

template <typename I>
using Key = std::conditional_t<sizeof(I) == 4, uint32_t, uint64_t>;

template <typename I>
using RowSorter = Sorter<Key<I>, I>;

// An index below `limit`: others have been refused before, but somebody else may have written to the pairs since.
template <typename In>
__device__ __forceinline__ int64_t bounded(In index, int64_t limit) {
  return index < 0 || static_cast<int64_t>(index) >= limit ? 0 : static_cast<int64_t>(index);
}

template <typename In, typename I>
__global__ void __launch_bounds__(kThreads)
    keys_of_rows(const In* rows, int64_t nnz, int64_t num_rows, Key<I>* keys, I* positions) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= nnz) return;
  keys[i] = static_cast<Key<I>>(bounded(rows[i], num_rows));
  positions[i] = static_cast<I>(i);
}

// indptr[r]: the number of keys below r.
template <typename K, typename I>
__device__ __forceinline__ void write_start(const K* keys, int64_t nnz, int64_t num_keys, int64_t r, I* indptr) {
  if (r > num_keys) return;
  int64_t low = 0, high = nnz;
  while (low < high) {
    const int64_t middle = (low + high) >> 1;
    if (static_cast<int64_t>(keys[middle]) < r) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  indptr[r] = static_cast<I>(low);
}

// CSR of pairs whose rows ascend. state: nnz minus the position of the first pair out of range, or 0; whether a row is
// smaller than the one before. If either, the arrays are worth nothing.
template <typename In, typename I>
__global__ void __launch_bounds__(kThreads)
    take_in_order(const In* rows, const In* cols, int64_t nnz, int64_t num_rows, int64_t num_cols, I* indptr,
                  I* indices, unsigned long long* state) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  write_start(rows, nnz, num_rows, i, indptr);
  if (i >= nnz) return;
  const int64_t row = rows[i], col = cols[i];
  const bool inside = row >= 0 && row < num_rows && col >= 0 && col < num_cols;
  // The first bad pair has the largest nnz - i, so that a zeroed cell can hold "none".
  if (!inside) atomicMax(state, static_cast<unsigned long long>(nnz - i));
  if (i && rows[i - 1] > row) state[1] = 1;
  indices[i] = static_cast<I>(col);
}

template <typename In, typename I>
__global__ void __launch_bounds__(kThreads)
    finish_pairs(const In* cols, const Key<I>* keys, const I* positions, int64_t nnz, int64_t num_rows,
                 int64_t num_cols, I* indptr, I* indices, I* edge_ids) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  write_start(keys, nnz, num_rows, i, indptr);
  if (i >= nnz) return;
  indices[i] = static_cast<I>(bounded(cols[positions[i]], num_cols));
  edge_ids[i] = positions[i];
}

template <typename I>
__global__ void __launch_bounds__(kThreads)
    finish_transpose(const I* indptr, const I* edge_ids, int64_t num_rows, const Key<I>* keys, const I* positions,
                     int64_t nnz, int64_t num_cols, I* t_indptr, I* t_indices, I* t_edge_ids) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  write_start(keys, nnz, num_cols, i, t_indptr);
  if (i >= nnz) return;
  const I k = positions[i];
  t_indices[i] = static_cast<I>(find_row(indptr, num_rows, static_cast<int64_t>(k)));
  t_edge_ids[i] = edge_ids ? edge_ids[k] : k;
}

}  // namespace

cudaError_t coo_in_order(const void* rows, const void* cols, int64_t nnz, int64_t num_rows, int64_t num_cols,
                         IndexType in_type, void* indptr, void* indices, IndexType out_type, void* state,
                         cudaStream_t stream) {
  const cudaError_t status = cudaMemsetAsync(state, 0, 2 * sizeof(int64_t), stream);
  if (status != cudaSuccess) return status;
  return with_index(in_type, [&](auto in) {
    return with_index(out_type, [&](auto out) {
      using In = decltype(in);
      using I = decltype(out);
      const int64_t threads = nnz > num_rows + 1 ? nnz : num_rows + 1;
      take_in_order<In, I><<<blocks_for(threads), kThreads, 0, stream>>>(
          static_cast<const In*>(rows), static_cast<const In*>(cols), nnz, num_rows, num_cols, static_cast<I*>(indptr),
          static_cast<I*>(indices), static_cast<unsigned long long*>(state));
      return cudaGetLastError();
    });
  });
}

cudaError_t coo_to_csr(Workspace& workspace, const void* rows, const void* cols, int64_t nnz, int64_t num_rows,
                       int64_t num_cols, IndexType in_type, void* indptr, void* indices, void* edge_ids,
                       IndexType out_type, cudaStream_t stream) {
  return with_index(in_type, [&](auto in) {
    return with_index(out_type, [&](auto out) {
      using In = decltype(in);
      using I = decltype(out);
      const int bits = bits_of(num_rows);
      RowSorter<I> sorter(workspace.take(RowSorter<I>::bytes(nnz, bits)), nnz, bits);
      const In *from_rows = static_cast<const In*>(rows), *from_cols = static_cast<const In*>(cols);
      if (nnz) {
        keys_of_rows<In, I>
            <<<blocks_for(nnz), kThreads, 0, stream>>>(from_rows, nnz, num_rows, sorter.keys[0], sorter.positions[0]);
        const cudaError_t status = sorter.sort(stream);
        if (status != cudaSuccess) return status;
      }
      const int64_t threads = nnz > num_rows + 1 ? nnz : num_rows + 1;
      finish_pairs<In, I><<<blocks_for(threads), kThreads, 0, stream>>>(
          from_cols, sorter.keys[1], sorter.positions[1], nnz, num_rows, num_cols, static_cast<I*>(indptr),
          static_cast<I*>(indices), static_cast<I*>(edge_ids));
      return cudaGetLastError();
    });
  });
}

cudaError_t transpose(Workspace& workspace, const Csr& graph, void* t_indptr, void* t_indices, void* t_edge_ids,
                      cudaStream_t stream) {
  return with_index(graph.index_type, [&](auto index) {
    using I = decltype(index);
    const int64_t nnz = graph.nnz;
    const int bits = bits_of(graph.num_cols);
    RowSorter<I> sorter(workspace.take(RowSorter<I>::bytes(nnz, bits)), nnz, bits);
    if (nnz) {
      keys_of_rows<I, I><<<blocks_for(nnz), kThreads, 0, stream>>>(static_cast<const I*>(graph.indices), nnz,
                                                                   graph.num_cols, sorter.keys[0], sorter.positions[0]);
      const cudaError_t status = sorter.sort(stream);
      if (status != cudaSuccess) return status;
    }
    const int64_t threads = nnz > graph.num_cols + 1 ? nnz : graph.num_cols + 1;
    finish_transpose<I><<<blocks_for(threads), kThreads, 0, stream>>>(
        static_cast<const I*>(graph.indptr), static_cast<const I*>(graph.edge_ids), graph.num_rows, sorter.keys[1],
        sorter.positions[1], nnz, graph.num_cols, static_cast<I*>(t_indptr), static_cast<I*>(t_indices),
        static_cast<I*>(t_edge_ids));
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace gnnaccel
