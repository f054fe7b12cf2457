// The backward of max and min: each gradient goes to the winner that the forward recorded.
//
// Two paths. Edges (rows_disjoint): no two rows name the same target, so one thread owns a row and one target
// feature, and adds in feature order without atomics. Sources: any rows may meet in a target, atomics add.
#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

constexpr int kThreads = 256;

template <typename T, typename I>
__global__ void __launch_bounds__(kThreads) disjoint_kernel(const I* arg, const T* values, T* target, int64_t num_rows,
                                                            int64_t num_feats, int64_t len, int64_t div) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (thread >= num_rows * len) return;
  const int64_t row = thread / len, element = thread % len;
  for (int64_t base = element * div; base < num_feats; base += len * div) {
    for (int64_t d = base; d < base + div; ++d) {
      const int64_t winner = arg[row * num_feats + d];
      if (winner < 0) continue;
      T* to = target + winner * len + element;
      *to = narrow<T>(widen(*to) + widen(values[row * num_feats + d]));
    }
  }
}

template <typename T, typename I>
__global__ void __launch_bounds__(kThreads)
    atomic_kernel(const I* arg, const T* values, T* target, int64_t count, int64_t num_feats) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (thread >= count) return;
  const int64_t winner = arg[thread];
  if (winner >= 0) atomicAdd(target + winner * num_feats + thread % num_feats, values[thread]);
}

}  // namespace

cudaError_t scatter_arg(const void* arg, const void* values, void* target, int64_t num_rows, int64_t num_feats,
                        int64_t len, int64_t div, bool rows_disjoint, IndexType index_type, DType dtype,
                        cudaStream_t stream) {
  if (num_rows == 0 || num_feats == 0) return cudaSuccess;
  return with_types(dtype, index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    const I* argmax = static_cast<const I*>(arg);
    const T* from = static_cast<const T*>(values);
    T* to = static_cast<T*>(target);
    if (rows_disjoint && (len == num_feats || sizeof(T) > 2)) {
      const unsigned blocks = static_cast<unsigned>(ceil_div(num_rows * len, kThreads));
      disjoint_kernel<<<blocks, kThreads, 0, stream>>>(argmax, from, to, num_rows, num_feats, len, div);
      return cudaGetLastError();
    }
    if constexpr (sizeof(T) > 2) {
      if (len == num_feats) {
        const int64_t count = num_rows * num_feats;
        const unsigned blocks = static_cast<unsigned>(ceil_div(count, kThreads));
        atomic_kernel<<<blocks, kThreads, 0, stream>>>(argmax, from, to, count, num_feats);
        return cudaGetLastError();
      }
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace cuda
}  // namespace gnnaccel
