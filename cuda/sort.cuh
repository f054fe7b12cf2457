// Sorting positions by keys, with CUB, and the scratch memory for it.
#pragma once

#include <cub/device/device_radix_sort.cuh>

#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace sort_impl {

constexpr int kThreads = 256;

inline unsigned blocks_for(int64_t count) { return static_cast<unsigned>(ceil_div(count, kThreads)); }

// Bits that numbers below `count` have.
inline int bits_of(int64_t count) {
  int bits = 1;
  while (bits < 63 && (int64_t{1} << bits) < count) ++bits;
  return bits;
}

inline int64_t padded(int64_t bytes) { return ceil_div(bytes, 256) * 256; }

// Hands out pieces of a workspace.
class Pieces {
 public:
  explicit Pieces(void* workspace) : at_(static_cast<char*>(workspace)) {}
  template <typename T>
  T* take(int64_t count) {
    char* here = at_;
    at_ += padded(count * static_cast<int64_t>(sizeof(T)));
    return reinterpret_cast<T*>(here);
  }

 private:
  char* at_;
};

// The scratch memory of one stable sort by `bits` bits from bit `first_bit` on: keys and positions, before and after,
// and what CUB wants.
template <typename K, typename I>
struct Sorter {
  K* keys[2];
  I* positions[2];
  void* storage;
  size_t storage_bytes;
  int64_t count;
  int bits;

  static size_t storage_size(int64_t count, int bits) {
    size_t size = 0;
    cub::DeviceRadixSort::SortPairs(nullptr, size, static_cast<const K*>(nullptr), static_cast<K*>(nullptr),
                                    static_cast<const I*>(nullptr), static_cast<I*>(nullptr), count, 0, bits);
    return size;
  }
  static int64_t bytes(int64_t count, int bits) {
    return 2 * padded(count * sizeof(K)) + 2 * padded(count * sizeof(I)) +
           padded(static_cast<int64_t>(storage_size(count, bits)));
  }
  int first_bit;

  Sorter(void* workspace, int64_t count, int bits, int first_bit = 0) : count(count), bits(bits), first_bit(first_bit) {
    Pieces pieces(workspace);
    for (auto& k : keys) k = pieces.take<K>(count);
    for (auto& p : positions) p = pieces.take<I>(count);
    storage_bytes = storage_size(count, bits);
    storage = pieces.take<char>(static_cast<int64_t>(storage_bytes));
  }
  cudaError_t sort(cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(storage, storage_bytes, keys[0], keys[1], positions[0], positions[1], count,
                                           first_bit, first_bit + bits, stream);
  }
};

}  // namespace sort_impl
}  // namespace cuda
}  // namespace gnnaccel
