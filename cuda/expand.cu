// Compressed rows and dense ones into each other.
#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStaged = 2048;  // bytes of a row that a warp puts together at a time

// A warp puts a row together in shared memory, a stretch at a time: places ascend, so each entry is read once, and the
// row is written in whole sectors. (A zero fill and a scatter would write it twice.)
template <typename T, typename P>
__global__ void __launch_bounds__(kThreads)
    expand_kernel(const T* values, const P* places, int64_t num_rows, T* out, int num_feats, int k) {
  constexpr int stretch = kStaged / sizeof(T);
  constexpr int n = 16 / sizeof(T);
  __shared__ uint4 shared[kWarps][stretch / n];
  const int lane = threadIdx.x % 32;
  uint4* fours = shared[threadIdx.x / 32];
  T* staged = reinterpret_cast<T*>(fours);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= num_rows) return;
  const bool vectors = num_feats % n == 0;
  int next = lane;  // the lane's next entry
  for (int first = 0; first < num_feats; first += stretch) {
    const int count = num_feats - first < stretch ? num_feats - first : stretch;
    for (int i = lane; i * n < count; i += 32) fours[i] = {};
    __syncwarp();
    for (; next < k; next += 32) {
      const int place = static_cast<int>(places[row * k + next]) - first;
      if (place >= count) break;
      staged[place] = values[row * k + next];
    }
    __syncwarp();
    T* to = out + row * num_feats + first;
    if (vectors) {
      for (int i = lane; i * n < count; i += 32) reinterpret_cast<uint4*>(to)[i] = fours[i];
    } else {
      for (int i = lane; i < count; i += 32) to[i] = staged[i];
    }
    __syncwarp();
  }
}

template <typename T, typename P>
__global__ void __launch_bounds__(kThreads)
    collect_kernel(const T* x, int64_t count, T* values, const P* places, int num_feats, int k) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) values[i] = x[i / k * num_feats + places[i]];
}

// Calls f(T{}, P{}) with an integer type of the dtype's size, and the type of places.
template <typename F>
cudaError_t with_bits(DType dtype, int64_t num_feats, F f) {
  auto with_place = [&](auto bits) { return num_feats <= 256 ? f(bits, uint8_t{}) : f(bits, uint16_t{}); };
  const int size = size_of(dtype);
  return size == 8 ? with_place(uint64_t{}) : size == 4 ? with_place(uint32_t{}) : with_place(uint16_t{});
}

}  // namespace

cudaError_t expand(const Compressed& x, int64_t num_rows, void* out, DType dtype, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  if (reinterpret_cast<uintptr_t>(out) % 16) return cudaErrorInvalidValue;
  return with_bits(dtype, x.num_feats, [&](auto bits, auto place) {
    using T = decltype(bits);
    using P = decltype(place);
    const auto blocks = static_cast<unsigned>(ceil_div(num_rows, kWarps));
    expand_kernel<T, P>
        <<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(x.values), static_cast<const P*>(x.places), num_rows,
                                          static_cast<T*>(out), static_cast<int>(x.num_feats), static_cast<int>(x.k));
    return cudaGetLastError();
  });
}

cudaError_t collect(const void* x, int64_t num_rows, const Compressed& kept, DType dtype, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  return with_bits(dtype, kept.num_feats, [&](auto bits, auto place) {
    using T = decltype(bits);
    using P = decltype(place);
    const int64_t count = num_rows * kept.k;
    const auto blocks = static_cast<unsigned>(ceil_div(count, kThreads));
    auto* values = static_cast<T*>(const_cast<void*>(kept.values));
    collect_kernel<T, P><<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(x), count, values,
                                                          static_cast<const P*>(kept.places),
                                                          static_cast<int>(kept.num_feats), static_cast<int>(kept.k));
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace gnnaccel
