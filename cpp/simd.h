// Vectors of the instruction set this file is compiled for, with bf16 widened to f32. GCC and Clang vector
// extensions: an operation on a vector type compiles to the widest instructions the target flags allow.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef GNNACCEL_ISA
#error "compile with -DGNNACCEL_ISA=baseline|avx2|avx512"
#endif

namespace gnnaccel::GNNACCEL_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

struct bf16 {
  uint16_t bits;
};

template <class T>
struct AccumulatorOf {
  using type = T;
};
template <>
struct AccumulatorOf<bf16> {
  using type = float;
};
template <class T>
using Acc = typename AccumulatorOf<T>::type;

template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(Acc<T>));

template <class A, int N>
struct VecOf {
  typedef A type __attribute__((vector_size(sizeof(A) * N)));
};
template <class A, int N>
using Vec = typename VecOf<A, N>::type;

template <int N, class A>
inline Vec<A, N> splat(A value) {
  return value - Vec<A, N>{};  // x - 0 is x for every x, so this is a broadcast; 0 + x is not, for -0
}

inline float widen(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(double x, double* out) { *out = x; }
inline void narrow(float x, bf16* out) {  // round to nearest even, NaN kept
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  out->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <int N>
inline Vec<float, N> load(const float* from) {
  Vec<float, N> out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}
template <int N>
inline Vec<double, N> load(const double* from) {
  Vec<double, N> out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}
template <int N>
inline Vec<float, N> load(const bf16* from) {
  Vec<uint16_t, N> half;
  std::memcpy(&half, from, sizeof(half));
  Vec<uint32_t, N> bits = __builtin_convertvector(half, Vec<uint32_t, N>) << 16;
  Vec<float, N> out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

template <int N>
inline void store(float* to, Vec<float, N> value) {
  std::memcpy(to, &value, sizeof(value));
}
template <int N>
inline void store(double* to, Vec<double, N> value) {
  std::memcpy(to, &value, sizeof(value));
}
template <int N>
inline void store(bf16* to, Vec<float, N> value) {
  for (int i = 0; i < N; ++i) narrow(value[i], to + i);
}

// The first `count`, less than N, of which no more is read or written; `rest` for the other lanes.
template <int N, class A>
inline Vec<A, N> load_first(const A* from, int64_t count, A rest) {
  Vec<A, N> out = splat<N>(rest);
#if defined(__AVX512F__)
  if constexpr (N == 16)
    return reinterpret_cast<Vec<A, N>>(
        _mm512_mask_loadu_ps(reinterpret_cast<__m512>(out), static_cast<__mmask16>((1u << count) - 1), from));
#endif
  std::memcpy(&out, from, sizeof(A) * static_cast<size_t>(count));
  return out;
}
template <int N, class A>
inline void store_first(A* to, Vec<A, N> value, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (N == 16)
    return _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), reinterpret_cast<__m512>(value));
#endif
  std::memcpy(to, &value, sizeof(A) * static_cast<size_t>(count));
}

// Lane i holds what lane i + kBy, counted round, held.
template <int kBy, int N, class A>
inline Vec<A, N> rotated(Vec<A, N> v) {
  using Index = Vec<std::conditional_t<sizeof(A) == 8, int64_t, int32_t>, N>;
  Index from;
  for (int i = 0; i < N; ++i) from[i] = (i + kBy) % N;
#if defined(__clang__)
  Vec<A, N> out;
  for (int i = 0; i < N; ++i) out[i] = v[from[i]];
  return out;
#else
  return __builtin_shuffle(v, from);
#endif
}

template <class A, int N>
inline A horizontal_sum(Vec<A, N> v) {  // halves, then halves of halves: log2(N) vector additions
  if constexpr (N == 1) {
    return v[0];
  } else {
    Vec<A, N / 2> half[2];
    std::memcpy(half, &v, sizeof(v));
    return horizontal_sum<A, N / 2>(half[0] + half[1]);
  }
}

// exp on f32 vectors: 2^n * p(r) with |r| <= ln2 / 2, a degree-6 polynomial; relative error under 2e-7 for
// x <= 0, which is all a softmax asks. Underflows to 0, keeps NaN, exp(0) is 1.
template <int N>
inline Vec<float, N> exp_nonpositive(Vec<float, N> x) {
  using U = Vec<uint32_t, N>;  // unsigned, because lanes that are masked in the end may overflow
  using V = Vec<float, N>;
  const U tiny = U(x < -87.0f);
  const V scaled = x * 1.44269504088896341f;
  const V shifted = scaled + 12582912.0f;  // 1.5 * 2^23: rounds to nearest, integer in the low mantissa bits
  const V n = shifted - 12582912.0f;
  const V r = (x - n * 0.693145751953125f) - n * 1.42860682030941723212e-6f;
  V p = r * 1.3981999507e-3f + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  U bits, power;
  std::memcpy(&power, &shifted, sizeof(power));
  power = ((power - 0x4b400000u) << 23) & ~U(x != x);  // the payload of a NaN is no exponent
  std::memcpy(&bits, &p, sizeof(bits));
  bits = (bits + power) & ~tiny;
  V out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

}  // namespace
}  // namespace gnnaccel::GNNACCEL_ISA
