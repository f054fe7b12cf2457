// Exponentials and softmax of short arrays that stay in cache, shared by edge_softmax and attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
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

template <int N>
inline Vec<float, N> exp_of(Vec<float, N> x) {
  return exp_nonpositive<N>(x);
}

template <int N>
inline Vec<double, N> exp_of(Vec<double, N> x) {
  for (int i = 0; i < N; ++i) x[i] = std::exp(x[i]);
  return x;
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

// The largest of each of W columns of x [n, stride].
template <int W, class A>
Vec<A, W> largest(const A* x, int64_t n, int64_t stride) {
  Vec<A, W> top = splat<W>(-std::numeric_limits<A>::infinity());
  for (int64_t i = 0; i < n; ++i) top = larger<W, A>(load<W>(x + i * stride), top);
  return top;
}

// Their sums: a plain f32 sum over a hub would lose two digits.
template <int W, class A>
Vec<A, W> sum_of(const A* x, int64_t n, int64_t stride) {
  PieceSum<Vec<A, W>> all;
  for (int64_t i0 = 0; i0 < n; i0 += kSumPiece) {
    Vec<A, W> piece{};
    for (int64_t i = i0; i < std::min(n, i0 + kSumPiece); ++i) piece += load<W>(x + i * stride);
    all.add(piece);
  }
  return all.total();
}

// body(lanes, column) over `count` columns, by vectors of as many lanes as fit.
template <class A, class Body>
void for_columns(int64_t count, const Body& body) {
  int64_t h = 0;
  for (; h + kLanes<A> <= count; h += kLanes<A>) body(std::integral_constant<int, kLanes<A>>{}, h);
  for (; h + 4 <= count; h += 4) body(std::integral_constant<int, 4>{}, h);
  for (; h < count; ++h) body(std::integral_constant<int, 1>{}, h);
}

// Of every lane what `combine` makes of all that lie a multiple of H from it.
template <int H, int N, class A, class F>
inline Vec<A, N> of_alike(Vec<A, N> v, const F& combine) {
  if constexpr (H < N) v = of_alike<2 * H, N, A>(v, combine), v = combine(v, rotated<H, N, A>(v));
  return v;
}

// softmax_rows for H heads, of which a vector holds several nonzeros'.
template <int H, class A, class Note>
void softmax_few(A* x, int64_t n, const Note& note) {
  constexpr int N = kLanes<A>;
  using V = Vec<A, N>;
  const int64_t whole = n * H / N * N, rest = n * H - whole;
  V last = load_first<N>(x + whole, rest, -std::numeric_limits<A>::infinity());
  V top = last;
  for (int64_t i = 0; i < whole; i += N) top = larger<N, A>(load<N>(x + i), top);
  top = of_alike<H, N, A>(top, [](V a, V b) { return larger<N, A>(a, b); });
  PieceSum<V> all;
  for (int64_t i0 = 0; i0 < whole; i0 += kSumPiece * N) {
    V piece{};
    for (int64_t i = i0; i < std::min(whole, i0 + kSumPiece * N); i += N) {
      const V weight = exp_of<N>(load<N>(x + i) - top);
      store<N>(x + i, weight);
      piece += weight;
    }
    all.add(piece);
  }
  if (rest) all.add(last = exp_of<N>(last - top));
  const V sum = of_alike<H, N, A>(all.total(), [](V a, V b) { return a + b; });
  for (int h = 0; h < H; ++h) note(h, static_cast<A>(top[h]), static_cast<A>(sum[h]));
  const V scale = splat<N>(A(1)) / sum;
  for (int64_t i = 0; i < whole; i += N) store<N>(x + i, load<N>(x + i) * scale);
  store_first<N>(x + whole, last * scale, rest);
}

// Softmax over the n rows of x [n, heads], in place; note(head, maximum, sum of exp(x - maximum)) is called for each
// head. A NaN score makes its head NaN, as do scores that are all -inf.
template <class A, class Note>
void softmax_rows(A* x, int64_t n, int64_t heads, const Note& note) {
  if (heads == 1) return softmax_few<1>(x, n, note);
  if (heads == 2) return softmax_few<2>(x, n, note);
  if constexpr (kLanes<A> >= 4)
    if (heads == 4) return softmax_few<4>(x, n, note);
  if constexpr (kLanes<A> >= 8)
    if (heads == 8) return softmax_few<8>(x, n, note);
  constexpr int64_t kColumns = 64;  // at a time, all of them where there are no more: exponentials do without columns
  A tops[kColumns];
  for (int64_t first = 0; first < heads; first += kColumns) {
    const int64_t count = std::min(kColumns, heads - first);
    A* const from = x + first;
    for_columns<A>(count, [&](auto lanes, int64_t h) {
      const auto top = largest<lanes>(from + h, n, heads);
      store<lanes>(tops + h, top);
      for (int64_t i = 0; i < n; ++i) store<lanes>(from + i * heads + h, load<lanes>(from + i * heads + h) - top);
    });
    if (count == heads)
      exp_all(x, n * heads);
    else
      for (int64_t i = 0; i < n; ++i) exp_all(from + i * heads, count);
    for_columns<A>(count, [&](auto lanes, int64_t h) {
      const auto sum = sum_of<lanes>(from + h, n, heads);
      for (int w = 0; w < lanes; ++w) note(first + h + w, tops[h + w], static_cast<A>(sum[w]));
      const auto scale = splat<lanes>(A(1)) / sum;
      for (int64_t i = 0; i < n; ++i) store<lanes>(from + i * heads + h, load<lanes>(from + i * heads + h) * scale);
    });
  }
}

}  // namespace
}  // namespace gnnaccel::GNNACCEL_ISA
