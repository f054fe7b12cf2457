// Exponentials and softmax of short arrays that stay in cache, shared by edge_softmax and attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

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

// Sums of pieces, of which a hub has as many as others have nonzeros: kSumPiece at a time.
template <class V>
class PieceSum {
 public:
  void add(V piece) {
    some_ += piece;
    if (++count_ % kSumPiece) return;
    all_ += some_;
    some_ = V{};
  }
  V total() const { return all_ + some_; }

 private:
  V some_{}, all_{};
  int64_t count_ = 0;
};

template <int W, class A>
inline Vec<A, W> larger(Vec<A, W> a, Vec<A, W> b) {
  return a > b ? a : b;
}

// Softmax over column h .. h + W of the n rows of x [n, stride], without the division: x becomes
// exp(x - top), and top and the sum of each column are returned.
template <int W, class A>
void shifted_exp(A* x, int64_t n, int64_t stride, Vec<A, W>* top, Vec<A, W>* sum) {
  *top = splat<W>(-std::numeric_limits<A>::infinity());
  for (int64_t i = 0; i < n; ++i) *top = larger<W, A>(load<W>(x + i * stride), *top);
  for (int64_t i = 0; i < n; ++i) store<W>(x + i * stride, load<W>(x + i * stride) - *top);
  if (stride == W)
    exp_all(x, n * W);
  else
    for (int64_t i = 0; i < n; ++i) exp_all(x + i * stride, W);
  PieceSum<Vec<A, W>> all;
  for (int64_t i0 = 0; i0 < n; i0 += kSumPiece) {  // a plain f32 sum over a hub would lose two digits
    Vec<A, W> piece{};
    for (int64_t i = i0; i < std::min(n, i0 + kSumPiece); ++i) piece += load<W>(x + i * stride);
    all.add(piece);
  }
  *sum = all.total();
}

// The same for one column without a stride, where the vectors lie along it.
template <class A>
void shifted_exp_flat(A* x, int64_t n, A* top, A* sum) {
  constexpr int W = kLanes<A>;
  Vec<A, W> tops = splat<W>(-std::numeric_limits<A>::infinity());
  PieceSum<Vec<A, W>> sums;
  const int64_t whole = n - n % W;
  for (int64_t i = 0; i < whole; i += W) tops = larger<W, A>(load<W>(x + i), tops);
  A best = tops[0];
  for (int w = 1; w < W; ++w) best = std::max(best, static_cast<A>(tops[w]));
  for (int64_t i = whole; i < n; ++i) best = std::max(best, x[i]);
  for (int64_t i = 0; i < n; ++i) x[i] -= best;
  exp_all(x, n);
  for (int64_t i0 = 0; i0 < whole; i0 += kSumPiece * W) {
    Vec<A, W> piece{};
    for (int64_t i = i0; i < std::min(whole, i0 + kSumPiece * W); i += W) piece += load<W>(x + i);
    sums.add(piece);
  }
  *top = best;
  *sum = horizontal_sum<A, W>(sums.total());
  for (int64_t i = whole; i < n; ++i) *sum += x[i];
}

// Softmax over the n rows of x [n, heads], in place; note(head, maximum, sum of exp(x - maximum)) is called for each
// head. A NaN score makes its head NaN, as do scores that are all -inf.
template <class A, class Note>
void softmax_rows(A* x, int64_t n, int64_t heads, const Note& note) {
  if (heads == 1) {
    A top, sum;
    shifted_exp_flat(x, n, &top, &sum);
    note(0, top, sum);
    const A scale = A(1) / sum;
    for (int64_t i = 0; i < n; ++i) x[i] *= scale;
    return;
  }
  const auto columns = [&](auto lanes, int64_t h) {
    constexpr int W = decltype(lanes)::value;
    Vec<A, W> top, sum;
    shifted_exp<W>(x + h, n, heads, &top, &sum);
    for (int w = 0; w < W; ++w) note(h + w, static_cast<A>(top[w]), static_cast<A>(sum[w]));
    const Vec<A, W> scale = splat<W>(A(1)) / sum;
    for (int64_t i = 0; i < n; ++i) store<W>(x + i * heads + h, load<W>(x + i * heads + h) * scale);
  };
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) columns(std::integral_constant<int, 4>{}, h);
  for (; h < heads; ++h) columns(std::integral_constant<int, 1>{}, h);
}

}  // namespace
}  // namespace gnnaccel::GNNACCEL_ISA
