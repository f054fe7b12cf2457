"""The CUDA C++ that every kernel of a program begins with."""

from __future__ import annotations

PROLOGUE = """\
#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#endif
"""

HELPERS = """\
using namespace gnnaccel::cuda;

namespace {

struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(Bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ float widen(Half x) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
#else
  return static_cast<float>(reinterpret_cast<const _Float16&>(x.bits));
#endif
}

__device__ __forceinline__ void narrow(A x, float* to) { *to = static_cast<float>(x); }
__device__ __forceinline__ void narrow(A x, double* to) { *to = static_cast<double>(x); }
__device__ __forceinline__ void narrow(A x, Bf16* to) {
  const float value = static_cast<float>(x);
  const uint32_t bits = __float_as_uint(value);
  to->bits = static_cast<uint16_t>(value != value ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
__device__ __forceinline__ void narrow(A x, Half* to) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(static_cast<float>(x)));
#else
  reinterpret_cast<_Float16&>(to->bits) = static_cast<_Float16>(static_cast<float>(x));
#endif
}
__device__ __forceinline__ float power(float x) { return expf(x); }
__device__ __forceinline__ double power(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ A infinite() { return static_cast<A>(__uint_as_float(0x7F800000u)); }
__device__ __forceinline__ A not_a_number() { return static_cast<A>(__uint_as_float(0x7FC00000u)); }

template <int BYTES>
struct Raw;
template <>
struct Raw<2> {
  using type = uint16_t;
};
template <>
struct Raw<4> {
  using type = uint32_t;
};
template <>
struct Raw<8> {
  using type = uint2;
};
template <>
struct Raw<16> {
  using type = uint4;
};

// N numbers, by as few loads or stores as there are. Of memory that the kernel may write into: not Constant.
template <int N, bool Constant = true, typename T>
__device__ __forceinline__ void load(const T* from, T* to) {
  constexpr int bytes = N * static_cast<int>(sizeof(T)), step = bytes < 16 ? bytes : 16, count = step / sizeof(T);
  using R = typename Raw<step>::type;
#pragma unroll
  for (int i = 0; i < bytes / step; ++i) {
    union Both {
      R raw;
      T values[count];
      __device__ __forceinline__ Both() {}
    } both;
    const R* at = reinterpret_cast<const R*>(from) + i;
    both.raw = Constant ? __ldg(at) : *at;
#pragma unroll
    for (int j = 0; j < count; ++j) to[i * count + j] = both.values[j];
  }
}
template <int N, typename T>
__device__ __forceinline__ void store(T* to, const A* from) {
  constexpr int bytes = N * static_cast<int>(sizeof(T)), step = bytes < 16 ? bytes : 16, count = step / sizeof(T);
  using R = typename Raw<step>::type;
#pragma unroll
  for (int i = 0; i < bytes / step; ++i) {
    union Both {
      R raw;
      T values[count];
      __device__ __forceinline__ Both() {}
    } both;
#pragma unroll
    for (int j = 0; j < count; ++j) narrow(from[i * count + j], both.values + j);
    reinterpret_cast<R*>(to)[i] = both.raw;
  }
}

// What two pieces, or lanes, of a row have found; pos: the nonzero of an extremum, -1 of none.
// Of a softmax: the greatest score, and the logarithm of the sum of exponentials without it.
struct PieceState {
  double value;
  int64_t pos;
  double top, log;
  bool any;
  __device__ __forceinline__ void clear() {
    value = 0;
    pos = -1;
    top = log = -infinite();
    any = false;
  }
};
__device__ __forceinline__ double weight_of(double log, double top, double greatest) {
  return top == -infinite() ? 0 : exp(log + (top - greatest));
}
__device__ __forceinline__ void take_top(PieceState& state, const PieceState& other) {
  if (other.any && (!state.any || other.value > state.value)) state = other;
}
__device__ __forceinline__ void add_logs(PieceState& state, const PieceState& other) {
  if (!other.any) return;
  if (!state.any) {
    state = other;
    return;
  }
  const double most = state.value > other.value ? state.value : other.value;
  const double least = state.value > other.value ? other.value : state.value;
  state.value = least == -infinite() ? most : most + log1p(exp(least - most));
}
__device__ __forceinline__ void add_totals(PieceState& state, const PieceState& other) {
  if (!other.any) return;
  if (!state.any) {
    state = other;
    return;
  }
  const double top = state.top > other.top ? state.top : other.top;
  state.value = log(weight_of(state.value, state.top, top) + weight_of(other.value, other.top, top));
  state.top = top;
}
__device__ __forceinline__ void add_weighed(PieceState& state, const PieceState& other) {
  if (!other.any) return;
  if (!state.any) {
    state = other;
    return;
  }
  const double top = state.top > other.top ? state.top : other.top;
  const double mine = weight_of(state.log, state.top, top), its = weight_of(other.log, other.top, top);
  const double value = (mine == 0 ? 0 : state.value * mine) + (its == 0 ? 0 : other.value * its);
  state.value = value / (mine + its);
  state.log = log(mine + its);
  state.top = top;
}
template <typename V>
__device__ __forceinline__ bool is_better(V x, int64_t pos, V than, int64_t than_pos, bool greatest) {
  if (pos < 0 || than_pos < 0) return pos >= 0;
  if (x != x || than != than) return x != x && (than == than || pos < than_pos);
  return (greatest ? x > than : x < than) || (x == than && pos < than_pos);
}
"""
