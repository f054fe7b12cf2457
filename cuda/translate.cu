// Sparse graph translation (types.h: Tiles): one stable sort of the nonzeros by window and column, two scans, and
// passes over the nonzeros. Sort and scans are CUB's.
#include <cub/device/device_scan.cuh>

#include "sort.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

using namespace sort_impl;

// Of a nonzero in sorted order: whether its column is the first of its kind in the window, and how many of the same
// column in the same row came before. Scanned: the most of these so far.
constexpr uint32_t kFirst = 1u << 31;
struct MostSoFar {
  __host__ __device__ uint32_t operator()(uint32_t a, uint32_t b) const {
    if (b & kFirst) return b;
    const uint32_t before = a & ~kFirst;
    return (a & kFirst) | (before > b ? before : b);
  }
};

// The row of nonzero k, which is that of this thread in a grid of one thread to a nonzero: looked for among the rows of
// the block's first and last. All threads of the block call it together; rubbish past the last nonzero.
template <typename I>
__device__ __forceinline__ int64_t row_in_block(const I* indptr, int64_t num_rows, int64_t nnz, int64_t k) {
  __shared__ int64_t ends[2];
  if (threadIdx.x < 2) {
    const int64_t end = k - threadIdx.x + (threadIdx.x ? kThreads - 1 : 0);
    ends[threadIdx.x] = find_row(indptr, num_rows, end < nnz ? end : nnz - 1);
  }
  __syncthreads();
  return find_row(indptr, ends[1] + 1, k, ends[0]);
}

// How a key is made: window, column, and, not sorted by, the row in the window.
struct KeyBits {
  int column;
  int row;

  __device__ __forceinline__ int64_t window(uint64_t key) const { return static_cast<int64_t>(key >> (column + row)); }
};

template <typename I>
__global__ void __launch_bounds__(kThreads) make_keys(const I* indptr, const I* indices, int64_t num_rows, int64_t nnz,
                                                      int64_t height, KeyBits bits, uint64_t* keys, I* positions) {
  const int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = row_in_block(indptr, num_rows, nnz, k);
  if (k >= nnz) return;
  const uint64_t window = row / height;
  keys[k] = (window << bits.column | static_cast<uint64_t>(indices[k])) << bits.row | (row - window * height);
  positions[k] = static_cast<I>(k);
}

// Nonzeros of one column are in order, row by row: those of one row are neighbours, and have the same key.
__global__ void __launch_bounds__(kThreads)
    mark_columns(int64_t nnz, KeyBits bits, const uint64_t* keys, uint32_t* marks) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= nnz) return;
  const uint64_t key = keys[i];
  uint32_t mark = kFirst;
  if (i && keys[i - 1] >> bits.row == key >> bits.row) {
    int64_t low = keys[i - 1] == key ? 0 : i, high = i;
    while (low < high) {
      const int64_t middle = (low + high) >> 1;
      if (keys[middle] == key) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    mark = static_cast<uint32_t>(i - low);
  }
  marks[i] = mark;
}

// 1 where a nonzero asks for another place in its window.
template <typename I>
__global__ void __launch_bounds__(kThreads)
    open_places(const uint32_t* marks, const uint32_t* most, int64_t nnz, I* opens) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= nnz) return;
  opens[i] = (marks[i] & kFirst) || (most[i] & ~kFirst) > (most[i - 1] & ~kFirst);
}

template <typename I>
__global__ void __launch_bounds__(kThreads)
    place_columns(const I* indptr, int64_t num_rows, int64_t nnz, int64_t height, int64_t num_windows, KeyBits bits,
                  const uint64_t* keys, const I* positions, const uint32_t* marks, const uint32_t* most,
                  const I* places, I* columns, I* window_columns) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  auto places_before = [&](int64_t row) {
    const I k = indptr[row < num_rows ? row : num_rows];
    return k ? places[k - 1] : I(0);
  };
  if (i < num_windows) window_columns[i] = places_before((i + 1) * height) - places_before(i * height);
  if (i >= nnz) return;
  const I first = places[i] - 1 - static_cast<I>(most[i] & ~kFirst);  // place of the column's first nonzero
  const int64_t window = bits.window(keys[i]);
  columns[positions[i]] = first + static_cast<I>(marks[i] & ~kFirst) - places_before(window * height);
}

// Where nonzero k is: its block, and its bit among the block's words.
template <typename I>
struct Spot {
  int64_t block;
  int64_t inside;

  __device__ __forceinline__ Spot(int64_t row, int64_t column, const Tiles& tiles) {
    const int64_t window = row / tiles.height;
    block = static_cast<const I*>(tiles.window_ptr)[window] + column / tiles.width;
    inside = (row - window * tiles.height) * tiles.width + column % tiles.width;
  }
};

using Word = unsigned long long;

template <typename I>
__global__ void __launch_bounds__(kThreads)
    set_bits(const I* indptr, const I* indices, int64_t num_rows, int64_t nnz, const I* columns, const Tiles tiles,
             I* sources, Word* bits, int64_t words) {
  const int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = row_in_block(indptr, num_rows, nnz, k);
  if (k >= nnz) return;
  const Spot<I> spot(row, columns[k], tiles);
  sources[spot.block * tiles.width + spot.inside % tiles.width] = indices[k];  // the same from every row
  atomicOr(bits + spot.block * words + spot.inside / 64, Word(1) << (spot.inside % 64));
}

template <typename I>
__global__ void __launch_bounds__(kThreads) count_bits(const Word* bits, int64_t num_blocks, int64_t words, I* counts) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b > num_blocks) return;
  I count = 0;
  for (int64_t i = 0; b < num_blocks && i < words; ++i) count += __popcll(bits[b * words + i]);
  counts[b] = count;
}

template <typename I>
__global__ void __launch_bounds__(kThreads)
    order_edges(const I* indptr, const I* edge_ids, int64_t num_rows, int64_t nnz, const I* columns, const Tiles tiles,
                const Word* bits, int64_t words, const I* block_ptr, I* edges) {
  const int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = row_in_block(indptr, num_rows, nnz, k);
  if (k >= nnz) return;
  const Spot<I> spot(row, columns[k], tiles);
  const Word* own = bits + spot.block * words;
  int64_t at = block_ptr[spot.block];
  for (int64_t i = 0; i < spot.inside / 64; ++i) at += __popcll(own[i]);
  at += __popcll(own[spot.inside / 64] & ((Word(1) << (spot.inside % 64)) - 1));
  edges[at] = edge_ids ? edge_ids[k] : static_cast<I>(k);
}

size_t scan_bytes(int64_t count) {
  size_t most = 0, sum = 0;
  cub::DeviceScan::InclusiveScan(nullptr, most, static_cast<const uint32_t*>(nullptr), static_cast<uint32_t*>(nullptr),
                                 MostSoFar{}, count);
  cub::DeviceScan::InclusiveSum(nullptr, sum, static_cast<const int64_t*>(nullptr), static_cast<int64_t*>(nullptr),
                                count);
  return most > sum ? most : sum;
}

template <typename I>
size_t offsets_bytes(int64_t num_blocks) {
  size_t size = 0;
  cub::DeviceScan::ExclusiveSum(nullptr, size, static_cast<const I*>(nullptr), static_cast<I*>(nullptr),
                                num_blocks + 1);
  return size;
}

int64_t windows_of(const Csr& graph, int64_t height) { return ceil_div(graph.num_rows, height); }

int sorted_bits(const Csr& graph, int64_t height) {
  return bits_of(windows_of(graph, height)) + bits_of(graph.num_cols);
}

}  // namespace

cudaError_t translate_columns(Workspace& workspace, const Csr& graph, int64_t height, void* columns,
                              void* window_columns, cudaStream_t stream) {
  // The marks below count in 31 bits, and keys hold window, column and row.
  const KeyBits bits{bits_of(graph.num_cols), bits_of(height)};
  const int sorted = sorted_bits(graph, height);
  if (sorted + bits.row > 64) return cudaErrorInvalidValue;
  return with_index(graph.index_type, [&](auto index) {
    using I = decltype(index);
    const int64_t nnz = graph.nnz, rows = graph.num_rows, windows = windows_of(graph, height);
    const I *indptr = static_cast<const I*>(graph.indptr), *indices = static_cast<const I*>(graph.indices);
    const int64_t sorter_bytes = Sorter<uint64_t, I>::bytes(nnz, sorted);
    void* const scratch = workspace.take(sorter_bytes + padded(static_cast<int64_t>(scan_bytes(nnz))));
    Sorter<uint64_t, I> sorter(scratch, nnz, sorted, bits.row);
    // What the sort reads is free afterwards: two marks of 4 bytes in the place of a key, places in that of a position.
    uint32_t *marks = reinterpret_cast<uint32_t*>(sorter.keys[0]), *most = marks + nnz;
    I* places = sorter.positions[0];
    const uint64_t* keys = sorter.keys[1];
    const I* positions = sorter.positions[1];
    if (nnz) {
      make_keys<I><<<blocks_for(nnz), kThreads, 0, stream>>>(indptr, indices, rows, nnz, height, bits, sorter.keys[0],
                                                             sorter.positions[0]);
      cudaError_t status = sorter.sort(stream);
      if (status != cudaSuccess) return status;
      void* storage = static_cast<char*>(scratch) + sorter_bytes;
      size_t bytes = scan_bytes(nnz);
      mark_columns<<<blocks_for(nnz), kThreads, 0, stream>>>(nnz, bits, keys, marks);
      status = cub::DeviceScan::InclusiveScan(storage, bytes, marks, most, MostSoFar{}, nnz, stream);
      if (status != cudaSuccess) return status;
      open_places<I><<<blocks_for(nnz), kThreads, 0, stream>>>(marks, most, nnz, places);
      status = cub::DeviceScan::InclusiveSum(storage, bytes, places, places, nnz, stream);
      if (status != cudaSuccess) return status;
    }
    const int64_t threads = nnz > windows ? nnz : windows;
    if (threads == 0) return cudaSuccess;
    place_columns<I><<<blocks_for(threads), kThreads, 0, stream>>>(
        indptr, rows, nnz, height, windows, bits, keys, positions, marks, most, places, static_cast<I*>(columns),
        static_cast<I*>(window_columns));
    return cudaGetLastError();
  });
}

cudaError_t translate_blocks(Workspace& workspace, const Csr& graph, const void* columns, const Tiles& tiles,
                             cudaStream_t stream) {
  return with_index(graph.index_type, [&](auto index) {
    using I = decltype(index);
    const int64_t nnz = graph.nnz, rows = graph.num_rows, blocks = tiles.num_blocks;
    const int64_t words = ceil_div(tiles.height * tiles.width, 64);
    const I *indptr = static_cast<const I*>(graph.indptr), *places = static_cast<const I*>(columns);
    auto writable = [](const void* from) { return static_cast<I*>(const_cast<void*>(from)); };
    Word* bits = static_cast<Word*>(const_cast<void*>(tiles.bits));
    I* block_ptr = writable(tiles.block_ptr);
    void* const scratch = workspace.take(static_cast<int64_t>(offsets_bytes<I>(blocks)));
    if (blocks) {
      cudaError_t status = cudaMemsetAsync(writable(tiles.columns), 0xFF, blocks * tiles.width * sizeof(I), stream);
      if (status != cudaSuccess) return status;
      status = cudaMemsetAsync(bits, 0, blocks * words * sizeof(Word), stream);
      if (status != cudaSuccess) return status;
      set_bits<I><<<blocks_for(nnz), kThreads, 0, stream>>>(indptr, static_cast<const I*>(graph.indices), rows, nnz,
                                                            places, tiles, writable(tiles.columns), bits, words);
    }
    count_bits<I><<<blocks_for(blocks + 1), kThreads, 0, stream>>>(bits, blocks, words, block_ptr);
    size_t bytes = offsets_bytes<I>(blocks);
    const cudaError_t status = cub::DeviceScan::ExclusiveSum(scratch, bytes, block_ptr, block_ptr, blocks + 1, stream);
    if (status != cudaSuccess || blocks == 0) return status;
    order_edges<I><<<blocks_for(nnz), kThreads, 0, stream>>>(indptr, static_cast<const I*>(graph.edge_ids), rows, nnz,
                                                             places, tiles, bits, words, block_ptr,
                                                             writable(tiles.edges));
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace gnnaccel
