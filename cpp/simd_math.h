// Elementary functions on vectors: f32 by polynomials (fitted over the reduced range; relative error under 4e-7 in the
// range of normal results), f64 lane by lane by the C library. NaN stays NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class A, int N, class F>
inline Vec<A, N> lane_by_lane(Vec<A, N> x, const F& f) {
  for (int i = 0; i < N; ++i) x[i] = f(static_cast<A>(x[i]));
  return x;
}

// x = n * ln 2 + r with |r| <= ln 2 / 2; n in float and as an integer.
template <int N>
struct Reduced {
  Vec<float, N> r;
  Vec<int32_t, N> n;
};
template <int N>
inline Reduced<N> reduce_exponent(Vec<float, N> x) {
  const Vec<float, N> shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to nearest
  const Vec<float, N> n = shifted - 12582912.0f;
  const auto low = bits_as<Vec<uint32_t, N>>(shifted) - 0x4b400000u;
  return {(x - n * 0.693145751953125f) - n * 1.42860682030941723212e-6f, bits_as<Vec<int32_t, N>>(low)};
}

// (exp(r) - 1 - r) / r^2 for |r| <= ln 2 / 2.
template <int N>
inline Vec<float, N> exp_tail(Vec<float, N> r) {
  Vec<float, N> p = r * 1.3933676227e-3f + 8.3631973770e-3f;
  p = p * r + 4.1666464681e-2f;
  p = p * r + 1.6666576872e-1f;
  return p * r + 5.0000000135e-1f;
}

template <int N>
inline Vec<float, N> power_of_two(Vec<int32_t, N> n) {  // n in [-126, 127]
  return bits_as<Vec<float, N>>((bits_as<Vec<uint32_t, N>>(n) + 127u) << 23);
}

template <int N>
inline Vec<float, N> vector_exp(Vec<float, N> given) {
  using V = Vec<float, N>;
  V x = given > 90.0f ? splat<N>(90.0f) : given;  // infinite from 88.8 on
  x = x < -105.0f ? splat<N>(-105.0f) : x;        // 0 from -104 on
  x = x == x ? x : V{};
  const Reduced<N> reduced = reduce_exponent<N>(x);
  const V r = reduced.r;
  const V p = exp_tail<N>(r) * r * r + r + 1.0f;
  const Vec<int32_t, N> half = reduced.n >> 1;  // in two steps, for results that are subnormal or infinite
  const V result = p * power_of_two<N>(half) * power_of_two<N>(reduced.n - half);
  return given == given ? result : given;
}
template <int N>
inline Vec<double, N> vector_exp(Vec<double, N> x) {
  return lane_by_lane<double, N>(x, [](double v) { return std::exp(v); });
}

template <int N>
inline Vec<float, N> vector_expm1(Vec<float, N> x) {
  const Vec<float, N> small = exp_tail<N>(x) * x * x + x;
  const auto near = (x < 0.34f) & (x > -0.34f);
  return near ? small : vector_exp<N>(x) - 1.0f;
}
template <int N>
inline Vec<double, N> vector_expm1(Vec<double, N> x) {
  return lane_by_lane<double, N>(x, [](double v) { return std::expm1(v); });
}

// log(1 + f) for 1 + f in [sqrt(1/2), sqrt(2)].
template <int N>
inline Vec<float, N> log_near_one(Vec<float, N> f) {
  Vec<float, N> p = f * -8.0996940975e-2f + 1.2711928684e-1f;
  p = p * f + -1.2972594744e-1f;
  p = p * f + 1.4202223595e-1f;
  p = p * f + -1.6642227558e-1f;
  p = p * f + 2.0001467089e-1f;
  p = p * f + -2.5000296834e-1f;
  p = p * f + 3.3333328602e-1f;
  return (p * f - 0.5f) * f * f + f;
}

template <int N>
inline Vec<float, N> vector_log(Vec<float, N> given) {
  using V = Vec<float, N>;
  using I = Vec<int32_t, N>;
  using U = Vec<uint32_t, N>;  // of negative numbers, which end as NaN, the differences overflow
  const auto subnormal = given < std::numeric_limits<float>::min();
  const V x = subnormal ? given * 8388608.0f : given;  // 2^23
  const U bits = bits_as<U>(x);
  // The exponent, so that what is left lies in [sqrt(1/2), sqrt(2)).
  const I exponent = bits_as<I>(bits - 0x3f3504f3u) >> 23;
  const V mantissa = bits_as<V>(bits - (bits_as<U>(exponent) << 23));
  const V n = __builtin_convertvector(exponent, V) - (subnormal ? splat<N>(23.0f) : V{});
  V result = log_near_one<N>(mantissa - 1.0f);
  result = (n * 1.42860682030941723212e-6f + result) + n * 0.693145751953125f;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  result = given == kInfinity ? given : result;
  result = given == 0.0f ? splat<N>(-kInfinity) : result;
  result = given < 0.0f ? splat<N>(std::numeric_limits<float>::quiet_NaN()) : result;
  return given == given ? result : given;
}
template <int N>
inline Vec<double, N> vector_log(Vec<double, N> x) {
  return lane_by_lane<double, N>(x, [](double v) { return std::log(v); });
}

template <int N>
inline Vec<float, N> vector_log1p(Vec<float, N> x) {
  const auto near = (x < 0.41f) & (x > -0.29f);
  return near ? log_near_one<N>(x) : vector_log<N>(x + 1.0f);
}
template <int N>
inline Vec<double, N> vector_log1p(Vec<double, N> x) {
  return lane_by_lane<double, N>(x, [](double v) { return std::log1p(v); });
}

template <class A, int N>
inline Vec<A, N> vector_sigmoid(Vec<A, N> x) {
  return A(1) / (vector_exp<N>(-x) + A(1));
}

template <int N>
inline Vec<float, N> vector_tanh(Vec<float, N> x) {
  using V = Vec<float, N>;
  const V square = x * x;
  V p = square * -5.9329801447e-3f + 2.0881318759e-2f;
  p = p * square + -5.3825848353e-2f;
  p = p * square + 1.3332601548e-1f;
  p = p * square + -3.3333327260e-1f;
  const V small = p * square * x + x;
  const auto near = (x < 0.65f) & (x > -0.65f);
  return near ? small : 1.0f - 2.0f / (vector_exp<N>(x + x) + 1.0f);
}
template <int N>
inline Vec<double, N> vector_tanh(Vec<double, N> x) {
  return lane_by_lane<double, N>(x, [](double v) { return std::tanh(v); });
}

template <class A, int N>
inline Vec<A, N> vector_sqrt(Vec<A, N> x) {  // GCC makes one instruction of it
  for (int i = 0; i < N; ++i) x[i] = std::sqrt(static_cast<A>(x[i]));
  return x;
}

}  // namespace
}  // namespace gnnaccel::GNNACCEL_ISA
