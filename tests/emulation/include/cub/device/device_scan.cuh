#pragma once

#include "../../cuda_runtime.h"

namespace cub {

struct DeviceScan {
  template <class In, class Out, class Op, class N>
  static cudaError_t InclusiveScan(void* storage, size_t& storage_bytes, In in, Out out, Op op, N count,
                                   cudaStream_t = nullptr) {
    if (!storage) {
      storage_bytes = 256;
      return cudaSuccess;
    }
    for (N i = 0; i < count; ++i) out[i] = i ? op(out[i - 1], in[i]) : in[i];
    return cudaSuccess;
  }
  template <class In, class Out, class N>
  static cudaError_t InclusiveSum(void* storage, size_t& storage_bytes, In in, Out out, N count,
                                  cudaStream_t stream = nullptr) {
    return InclusiveScan(storage, storage_bytes, in, out, [](auto a, auto b) { return a + b; }, count, stream);
  }
  template <class In, class Out, class N>
  static cudaError_t ExclusiveSum(void* storage, size_t& storage_bytes, In in, Out out, N count,
                                  cudaStream_t = nullptr) {
    if (!storage) {
      storage_bytes = 256;
      return cudaSuccess;
    }
    std::decay_t<decltype(out[0])> sum = 0;
    for (N i = 0; i < count; ++i) {
      const auto value = in[i];
      out[i] = sum;
      sum += value;
    }
    return cudaSuccess;
  }
};

}  // namespace cub
