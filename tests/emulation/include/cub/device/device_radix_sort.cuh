#pragma once

#include "../../cuda_runtime.h"

namespace cub {

struct DeviceRadixSort {
  template <class K, class V, class N>
  static cudaError_t SortPairs(void* storage, size_t& storage_bytes, const K* keys_in, K* keys_out, const V* values_in,
                               V* values_out, N count, int begin_bit, int end_bit, cudaStream_t = nullptr) {
    if (!storage) {
      storage_bytes = 256;
      return cudaSuccess;
    }
    const K mask = end_bit >= static_cast<int>(sizeof(K)) * 8 ? ~K(0) : (K(1) << end_bit) - 1;
    auto key = [&](N i) { return (keys_in[i] & mask) >> begin_bit; };
    std::vector<N> order(count);
    for (N i = 0; i < count; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](N a, N b) { return key(a) < key(b); });
    for (N i = 0; i < count; ++i) {
      keys_out[i] = keys_in[order[i]];
      values_out[i] = values_in[order[i]];
    }
    return cudaSuccess;
  }
};

}  // namespace cub
