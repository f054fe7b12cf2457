// What the kernels share: accumulator types, 16-byte loads, operand addressing, the search for a row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels.h"
#include "walk.cuh"

namespace gnnaccel {
namespace cuda {

// 16-bit types accumulate in f32, the others in themselves.
template <typename T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
__device__ __forceinline__ Acc<T> widen(T x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __half2float(x);
  } else {
    return x;
  }
}

template <typename T>
__device__ __forceinline__ T narrow(Acc<T> x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half(x);
  } else {
    return x;
  }
}

// N values in one register group that loads and stores as one instruction (N * sizeof(T) is 1, 2, 4, 8 or 16).
template <typename T, int N>
union Pack {
  static constexpr int bytes = N * static_cast<int>(sizeof(T));
  static_assert(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16, "a load moves 1 to 16 bytes");
  using Few = std::conditional_t<bytes == 4, uint32_t, std::conditional_t<bytes == 2, uint16_t, uint8_t>>;
  using Raw = std::conditional_t<bytes == 16, uint4, std::conditional_t<bytes == 8, uint2, Few>>;
  Raw raw;
  T values[N];
  __device__ __forceinline__ Pack() {}
};

// Inputs are never written while a kernel runs, so they may go through the read-only path.
template <typename T, int N>
__device__ __forceinline__ void load(const T* from, Pack<T, N>& to) {
  to.raw = __ldg(reinterpret_cast<const typename Pack<T, N>::Raw*>(from));
}

// One value. Not __ldg of a 16-bit type: that is inline assembly which the compiler takes for free of side effects, and
// moves out of the branch that asks whether there is anything to read.
template <typename T>
__device__ __forceinline__ Acc<T> load_one(const T* from) {
  Pack<T, 1> one;
  load(from, one);
  return widen(one.values[0]);
}

template <typename T, int N>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& from) {
  *reinterpret_cast<typename Pack<T, N>::Raw*>(to) = from.raw;
}

// base + row * len. With 32-bit rows one wide multiply-add, which the compiler does not find by itself.
template <typename T, typename I>
__device__ __forceinline__ const T* row_address(const T* base, I row, int len) {
  if constexpr (sizeof(I) == 4) {
    const T* address;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(row), "r"(len * static_cast<int>(sizeof(T))), "l"(base));
    return address;
  } else {
    return base + static_cast<int64_t>(row) * len;
  }
}

// Values of one load of a row of D, which is 1, 2, 3, 4 or 8: three are loaded one by one (two together, which lie in
// the first or in the last places, take longer).
template <typename T, int D>
constexpr int vector_of = D == 3               ? 1
                          : D * sizeof(T) > 16 ? 16 / static_cast<int>(sizeof(T))
                                               : D;

// Bytes to which rows that are loaded so are aligned.
constexpr int64_t row_alignment(int64_t D, int64_t size) { return D == 3 ? size : D * size < 16 ? D * size : 16; }

// Row `row` of D values.
template <int D, int N, typename T, typename I>
__device__ __forceinline__ void load_row(const T* base, I row, Pack<T, N> (&to)[D / N]) {
  const T* from = row_address(base, row, D);
#pragma unroll
  for (int i = 0; i < D / N; ++i) load(from + i * N, to[i]);
}

// How one thread reads the features d .. d + N - 1 (d a multiple of N) of an Operand: N consecutive values
// (wide) or one value for all of them. The host picks N so that one of the two holds, see fits(). Feature
// counts fit 32 bits, which keeps the addresses to one multiply-add and the divisions short.
template <typename T, int N>
struct Reader {
  const T* data;
  int len;
  bool wide;

  __device__ __forceinline__ Reader(const Operand& from, int64_t d)
      : len(static_cast<int>(from.len)), wide(N > 1 && from.div == 1 && from.len % N == 0) {
    uint32_t element = static_cast<uint32_t>(d);
    if (from.div != 1) element /= static_cast<uint32_t>(from.div);
    if (element >= static_cast<uint32_t>(len)) element %= static_cast<uint32_t>(len);
    data = static_cast<const T*>(from.data) + element;
  }

  template <typename I>
  __device__ __forceinline__ void fetch(I row, Pack<T, N>& to) const {
    const T* from = row_address(data, row, len);
    if (wide) {
      load(from, to);
    } else {
      Pack<T, 1> one;
      load(from, one);
      to.values[0] = one.values[0];
    }
  }

  __device__ __forceinline__ Acc<T> value(const Pack<T, N>& from, int i) const {
    return widen(wide || N == 1 ? from.values[i] : from.values[0]);
  }
};

// True if Reader<T, N> can serve `x` (with T of `size` bytes); a null operand is never read.
inline bool fits(const Operand& x, int n, int size) {
  if (x.data == nullptr || n == 1) return true;
  if (x.div == 1 && x.len % n == 0) return reinterpret_cast<uintptr_t>(x.data) % (n * size) == 0;
  return x.len == 1 || x.div % n == 0;
}

// Bit i: `flag` of lane i of this thread's group of L lanes (a power of two).
template <int L>
__device__ __forceinline__ unsigned group_ballot(bool flag) {
  const unsigned all = __ballot_sync(~0u, flag);
  if constexpr (L == 32) {
    return all;
  } else {
    return all >> (threadIdx.x % 32 / L * L) & ((1u << L) - 1);
  }
}

// The same by each group of L lanes for a nonzero of its own, probing L rows at a time (4 rounds of 32 for a million
// rows instead of 20); all lanes of the warp call it together.
template <int L, typename I>
__device__ __forceinline__ I find_row_by_group(const I* indptr, int64_t num_rows, I k) {
  const int lane = threadIdx.x % L;
  int64_t low = 0, high = num_rows;
  while (__any_sync(~0u, high - low > 1)) {
    const int64_t step = (high - low + L) / (L + 1);
    const int64_t probe = low + (lane + 1) * step;
    const bool below = probe < high && __ldg(indptr + probe) <= k;
    low += __popc(group_ballot<L>(below)) * step;
    high = low + step < high ? low + step : high;
  }
  return static_cast<I>(low);
}

inline int size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }
inline int accumulator_size(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t next_power_of_two(int64_t x) {
  int64_t p = 1;
  while (p < x) p *= 2;
  return p;
}

// Threads of a block of a kernel that reads a work list and is compiled for kMaxListThreads. Large blocks start more
// rows of equal length together, which then stay in step: reddit-like, 32 features, 1.39 ms instead of 1.45. Where rows
// are short they cost more than they gain: amazon0505-like, 128 features, 0.535 ms instead of 0.519 (H200).
constexpr int kMaxListThreads = 512;
// A small graph needs all the blocks it can get.
constexpr int64_t kInStepDegree = 128;
constexpr int64_t kInStepNonzeros = 10000000;
inline int list_threads(const Csr& graph) {
  const bool large = graph.nnz >= kInStepNonzeros && graph.nnz / graph.num_rows >= kInStepDegree;
  return large ? kMaxListThreads : kMaxListThreads / 2;
}

// Calls f(I{}) with the C++ type of an index type.
template <typename F>
auto with_index(IndexType type, F f) {
  return type == IndexType::i32 ? f(int32_t{}) : f(int64_t{});
}

// Calls f(T{}, I{}) with the C++ types of a dtype and an index type.
template <typename F>
cudaError_t with_types(DType dtype, IndexType index_type, F f) {
  auto with_value = [&](auto value) { return with_index(index_type, [&](auto index) { return f(value, index); }); };
  switch (dtype) {
    case DType::f32:
      return with_value(float{});
    case DType::f64:
      return with_value(double{});
    case DType::bf16:
      return with_value(__nv_bfloat16{});
    case DType::f16:
      return with_value(__half{});
  }
  return cudaErrorInvalidValue;
}

// Lets a kernel have more shared memory than a kernel gets unasked.
template <typename K>
cudaError_t allow_shared(K kernel, int64_t bytes) {
  if (bytes <= 49152) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

}  // namespace cuda
}  // namespace gnnaccel
