// Exponentials and softmax of short arrays that stay in cache, shared by edge_softmax and attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

constexpr int64_t kSumPiece = 128;  // terms summed before they join the row's total

inline void exp_all(double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = std::exp(x[i]);
}

inline void exp_all(float* x, int64_t n) {
  constexpr int N = kLanes<float>;
  int64_t i = 0;
  for (; i + N <= n; i += N) store<N>(x + i, exp_nonpositive<N>(load<N>(x + i)));
  if (i == n) return;
  float rest[N] = {};
  std::copy(x + i, x + n, rest);
  store<N>(rest, exp_nonpositive<N>(load<N>(rest)));
  std::copy(rest, rest + (n - i), x + i);
}

// Softmax over the n rows of x [n, heads], in place; lse [heads] receives log sum exp. A NaN score makes its
// head NaN, as do scores that are all -inf.
template <class A>
void softmax_rows(A* x, int64_t n, int64_t heads, A* lse) {
  constexpr int64_t kChunk = 16;  // heads at a time, so that their statistics are small arrays
  for (int64_t h0 = 0; h0 < heads; h0 += kChunk) {
    const int64_t width = std::min(kChunk, heads - h0);
    A top[kChunk], sum[kChunk] = {}, piece[kChunk];
    std::fill(top, top + kChunk, -std::numeric_limits<A>::infinity());
    for (int64_t i = 0; i < n; ++i)
      for (int64_t h = 0; h < width; ++h) top[h] = std::max(top[h], x[i * heads + h0 + h]);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t h = 0; h < width; ++h) x[i * heads + h0 + h] -= top[h];
    if (heads <= kChunk) {
      exp_all(x, n * heads);
    } else {
      for (int64_t i = 0; i < n; ++i) exp_all(x + i * heads + h0, width);
    }
    for (int64_t i0 = 0; i0 < n; i0 += kSumPiece) {  // a plain f32 sum over a hub would lose two digits
      std::fill(piece, piece + kChunk, A(0));
      for (int64_t i = i0; i < std::min(n, i0 + kSumPiece); ++i)
        for (int64_t h = 0; h < width; ++h) piece[h] += x[i * heads + h0 + h];
      for (int64_t h = 0; h < width; ++h) sum[h] += piece[h];
    }
    for (int64_t h = 0; h < width; ++h) {
      lse[h0 + h] = top[h] + std::log(sum[h]);
      sum[h] = A(1) / sum[h];
    }
    for (int64_t i = 0; i < n; ++i)
      for (int64_t h = 0; h < width; ++h) x[i * heads + h0 + h] *= sum[h];
  }
}

}  // namespace
}  // namespace gnnaccel::GNNACCEL_ISA
