// From COO to CSR, from CSR to its transpose, and the sum over a transpose that nobody keeps. Of small graphs by
// small_sort.cuh; of others by a stable radix sort of (row, position) pairs over the bits that rows have, which is
// CUB's, then the row starts by binary search and the gathers.
#include <algorithm>

#include "small_sort.cuh"
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

// CSR of pairs whose rows ascend. If asked sets found[0] where a pair is out of range, found[1] where a row is smaller
// than the one before; if either, the arrays are worth nothing.
template <typename In, typename I>
__global__ void __launch_bounds__(kThreads)
    take_in_order(const In* rows, const In* cols, int64_t nnz, int64_t num_rows, int64_t num_cols, I* indptr,
                  I* indices, volatile int64_t* found) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  write_start(rows, nnz, num_rows, i, indptr);
  bool outside = false, descends = false;
  if (i < nnz) {
    const int64_t row = rows[i], col = cols[i];
    outside = row < 0 || row >= num_rows || col < 0 || col >= num_cols;
    descends = i && rows[i - 1] > row;
    indices[i] = static_cast<I>(outside ? 0 : col);
  }
  if (!found) return;
  // By one thread of a block: a store to the host's memory goes over the bus.
  const bool any_outside = __syncthreads_or(outside), any_descends = __syncthreads_or(descends);
  if (threadIdx.x == 0 && any_outside) found[0] = 1;
  if (threadIdx.x == 0 && any_descends) found[1] = 1;
}

// Two numbers of the host that kernels of this thread's calls write to: without a copy, which would take longer to ask
// for than the kernel that it waits for.
class Found {
 public:
  int64_t* numbers = nullptr;
  cudaError_t status = cudaHostAlloc(reinterpret_cast<void**>(&numbers), 2 * sizeof(int64_t), cudaHostAllocPortable);
  ~Found() {
    if (status == cudaSuccess) cudaFreeHost(numbers);
  }
};

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

// Of pairs: position i has row rows[i]. Of nonzeros, for a transpose: column indices[i].
template <typename In>
struct KeyOf {
  const In* keys;
  int64_t limit;
  __device__ __forceinline__ int operator()(int i) const { return static_cast<int>(bounded(keys[i], limit)); }
};

template <typename In, typename I>
struct WritePair {
  const In* cols;
  int64_t num_cols;
  I *indices, *edge_ids;
  __device__ __forceinline__ void operator()(int slot, int i) const {
    indices[slot] = static_cast<I>(bounded(cols[i], num_cols));
    edge_ids[slot] = static_cast<I>(i);
  }
};

template <typename I>
struct WriteTransposed {
  const I *indptr, *edge_ids;
  int64_t num_rows;
  I *t_indices, *t_edge_ids;
  __device__ __forceinline__ void operator()(int slot, int k) const {
    t_indices[slot] = static_cast<I>(find_row(indptr, num_rows, static_cast<int64_t>(k)));
    t_edge_ids[slot] = edge_ids ? edge_ids[k] : static_cast<I>(k);
  }
};

}  // namespace

cudaError_t coo_in_order(const void* rows, const void* cols, int64_t nnz, int64_t num_rows, int64_t num_cols,
                         IndexType in_type, void* indptr, void* indices, IndexType out_type, int64_t* found,
                         cudaStream_t stream) {
  int64_t* numbers = nullptr;
  if (found) {
    thread_local const Found state;
    if (state.status != cudaSuccess) return state.status;
    numbers = state.numbers;
    numbers[0] = numbers[1] = 0;
  }
  cudaError_t status = with_index(in_type, [&](auto in) {
    return with_index(out_type, [&](auto out) {
      using In = decltype(in);
      using I = decltype(out);
      const int64_t threads = nnz > num_rows + 1 ? nnz : num_rows + 1;
      take_in_order<In, I><<<blocks_for(threads), kThreads, 0, stream>>>(
          static_cast<const In*>(rows), static_cast<const In*>(cols), nnz, num_rows, num_cols, static_cast<I*>(indptr),
          static_cast<I*>(indices), numbers);
      return cudaGetLastError();
    });
  });
  if (!found) return status;
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  std::copy_n(numbers, 2, found);
  return status;
}

cudaError_t coo_to_csr(Workspace& workspace, const void* rows, const void* cols, int64_t nnz, int64_t num_rows,
                       int64_t num_cols, IndexType in_type, void* indptr, void* indices, void* edge_ids,
                       IndexType out_type, cudaStream_t stream) {
  return with_index(in_type, [&](auto in) {
    return with_index(out_type, [&](auto out) {
      using In = decltype(in);
      using I = decltype(out);
      const In *from_rows = static_cast<const In*>(rows), *from_cols = static_cast<const In*>(cols);
      if (is_small_sort(nnz, num_rows)) {
        const WritePair<In, I> write{from_cols, num_cols, static_cast<I*>(indices), static_cast<I*>(edge_ids)};
        return small_sort(workspace, nnz, num_rows, static_cast<I*>(indptr), KeyOf<In>{from_rows, num_rows}, write,
                          stream);
      }
      const int bits = bits_of(num_rows);
      RowSorter<I> sorter(workspace.take(RowSorter<I>::bytes(nnz, bits)), nnz, bits);
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
    const auto* cols = static_cast<const I*>(graph.indices);
    if (is_small_sort(nnz, graph.num_cols)) {
      const WriteTransposed<I> write{static_cast<const I*>(graph.indptr), static_cast<const I*>(graph.edge_ids),
                                     graph.num_rows, static_cast<I*>(t_indices), static_cast<I*>(t_edge_ids)};
      return small_sort(workspace, nnz, graph.num_cols, static_cast<I*>(t_indptr), KeyOf<I>{cols, graph.num_cols},
                        write, stream);
    }
    const int bits = bits_of(graph.num_cols);
    RowSorter<I> sorter(workspace.take(RowSorter<I>::bytes(nnz, bits)), nnz, bits);
    if (nnz) {
      keys_of_rows<I, I>
          <<<blocks_for(nnz), kThreads, 0, stream>>>(cols, nnz, graph.num_cols, sorter.keys[0], sorter.positions[0]);
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

cudaError_t spmm_transposed(Workspace& workspace, const Csr& graph, const void* x, const void* weight, void* out,
                            int64_t num_feats, DType dtype, const Fused& fused, cudaStream_t stream) {
  const int64_t bytes = graph.index_type == IndexType::i64 ? 8 : 4;
  const int64_t edges = padded(bytes * graph.nnz);
  sort_impl::Pieces pieces(workspace.take(padded(bytes * (graph.num_cols + 1)) + 2 * edges));
  char* indptr = pieces.take<char>(bytes * (graph.num_cols + 1));
  char *indices = pieces.take<char>(edges), *edge_ids = pieces.take<char>(edges);
  const cudaError_t status = transpose(workspace, graph, indptr, indices, edge_ids, stream);
  if (status != cudaSuccess) return status;
  const Csr transposed{indptr, indices, edge_ids, graph.num_cols, graph.num_rows, graph.nnz, graph.index_type, 0};
  return spmm(workspace, transposed, {}, {x, num_feats, 1}, {weight, 1, 1}, out, nullptr, nullptr, num_feats,
              weight ? Message::mul : Message::copy_lhs, Reduce::sum, dtype, 0.0, fused, stream);
}

}  // namespace cuda
}  // namespace gnnaccel
