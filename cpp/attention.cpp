// Additive graph attention (GAT) on the CPU: one pass over the edges forward, one backward; nothing of the size
// of the edges is stored. A row's scores are computed into a buffer that stays in cache, and the probabilities
// of the backward are recomputed from the row's saved log-sum-exp.
//   s(k, h)    = score_src[u, h] + score_dst[v, h]
//   p(k, h)    = exp(leaky(s) - lse[v, h])
//   out[v, h]  = sum over k of p * factor[e, h] * x[u, h]
//   backward   d s(k, h) = p * (factor * <x[u, h], grad_out[v, h]> - delta[v, h]) * leaky'(s)
//              delta[v, h] = <out[v, h], grad_out[v, h]>
// Summed by source, d s needs the walk over the transposed rows that grad_x needs anyway. Summed by destination
// it needs no walk: leaky' is slope + (1 - slope) * [s > 0], and the slope's part cancels, which leaves
//   grad_score_dst[v, h] = (1 - slope) * (<out_pos[v, h], grad_out[v, h]> - delta[v, h] * p_pos[v, h])
// with out_pos and p_pos the sums of out and of p over the edges whose s is positive, kept by the forward.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "gather.h"
#include "isa.h"
#include "simd_exp.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

// lanes(W, h) over the heads, four at a time where they come in fours.
template <class Body>
void for_heads(int64_t heads, const Body& body) {
  const bool fours = heads % 4 == 0;
  for (int64_t h = 0; h < heads; h += fours ? 4 : 1)
    fours ? body(std::integral_constant<int, 4>{}, h) : body(std::integral_constant<int, 1>{}, h);
}

// For the nonzeros k0 .. k1 of destination v: scores[k - k0, h] = leaky(s), and with kKeep positive = [s > 0].
template <int W, bool kKeep, class T, class I>
void forward_scores(const AttentionArgs& a, const CsrOf<I>& g, int64_t v, int64_t k0, int64_t k1, int64_t h, T* scores,
                    T* positive) {
  using V = Vec<T, W>;
  const V zero{}, one = splat<W>(T(1)), leak = splat<W>(static_cast<T>(a.slope));
  const auto* src = static_cast<const T*>(a.score_src);
  const V base = load<W>(static_cast<const T*>(a.score_dst) + v * a.num_heads + h);
  for (int64_t k = k0; k < k1; ++k) {
    const V s = base + load<W>(src + static_cast<int64_t>(g.indices[k]) * a.num_heads + h);
    const int64_t i = (k - k0) * a.num_heads + h;
    store<W>(scores + i, s * (s > zero ? one : leak));
    if constexpr (kKeep) store<W>(positive + i, s > zero ? one : zero);
  }
}

// sum over i = 0, stride .. n of a[i] * b[i] (of a[i] without kProducts), for W neighbouring columns; in pieces, as a
// plain f32 sum over a hub would lose two digits.
template <int W, bool kProducts, class T>
void add_columns(const T* a, const T* b, int64_t n, int64_t stride, T* out) {
  PieceSum<Vec<T, W>> sum;
  for (int64_t i0 = 0; i0 < n; i0 += kSumPiece * stride) {
    Vec<T, W> piece{};
    for (int64_t i = i0; i < std::min(n, i0 + kSumPiece * stride); i += stride)
      piece += kProducts ? load<W>(a + i) * load<W>(b + i) : load<W>(a + i);
    sum.add(piece);
  }
  store<W>(out, sum.total());
}

template <int N, bool kKeep, class T, class I>
void forward(const AttentionArgs& a, int threads) {
  const CsrOf<I> g(a.graph);
  const int64_t heads = a.num_heads;
  const EdgeFactors<T> factor(a.factor);
  const Gather<T, I> gather{g, static_cast<const T*>(a.x), nullptr, heads, a.width};
  for_rows<T>(g, heads, a.width, kKeep ? 2 : 1, threads, [&](int64_t v, int64_t k0, int64_t k1, T* p, T* part) {
    const int64_t n = (k1 - k0) * heads;
    T *out = static_cast<T*>(a.out) + v * a.width, *lse = static_cast<T*>(a.lse) + v * heads;
    T *positive = nullptr, *out_pos = nullptr, *p_pos = nullptr;  // of edges with a positive score, where kept
    if constexpr (kKeep) {
      positive = p + n;
      out_pos = static_cast<T*>(a.out_pos) + v * a.width;
      p_pos = static_cast<T*>(a.p_pos) + v * heads;
    }
    if (k0 == k1) {
      std::fill(lse, lse + heads, T(0));
      std::fill(out, out + a.width, T(0));
      if constexpr (kKeep) {
        std::fill(p_pos, p_pos + heads, T(0));
        std::fill(out_pos, out_pos + a.width, T(0));
      }
      return;
    }
    for_heads(heads, [&](auto lanes, int64_t h) {
      forward_scores<decltype(lanes)::value, kKeep>(a, g, v, k0, k1, h, p, positive);
    });
    softmax_rows(p, k1 - k0, heads, [&](int64_t h, T top, T sum) { lse[h] = top + std::log(sum); });
    if constexpr (kKeep)
      for_heads(heads, [&](auto lanes, int64_t h) {
        add_columns<decltype(lanes)::value, true>(p + h, positive + h, n, heads, p_pos + h);
      });
    if (factor.any())
      for (int64_t k = k0; k < k1; ++k) factor.multiply(p + (k - k0) * heads, g.edge(k), heads);
    if constexpr (kKeep)
      for (int64_t i = 0; i < n; ++i) positive[i] *= p[i];
    const Sum<T> sums[] = {{p, out}, {positive, out_pos}};
    gather_long_row<N, false, 1 + kKeep>(gather, v, k0, k1, static_cast<T*>(nullptr), sums, part);
  });
}

// What the walk over the transposed rows gathers of a destination: score, lse and delta, side by side.
template <int N, class T>
void backward_of_destinations(const AttentionArgs& a, T* packed, int threads) {
  const int64_t heads = a.num_heads, per_head = a.width / heads, rows = a.transposed.num_cols;
  const int64_t tasks = std::min<int64_t>(rows, threads * int64_t{8});
  parallel_for(tasks, threads, [&](int64_t t) {
    for (int64_t v = rows * t / tasks; v < rows * (t + 1) / tasks; ++v)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = v * heads + h;
        Vec<T, N> all{}, positive{};
        for (int64_t d = at * per_head; d < (at + 1) * per_head; d += N) {
          const auto grad = load<N>(static_cast<const T*>(a.grad_out) + d);
          all += grad * load<N>(static_cast<const T*>(a.out) + d);
          positive += grad * load<N>(static_cast<const T*>(a.out_pos) + d);
        }
        const T delta = horizontal_sum<T, N>(all), p_pos = static_cast<const T*>(a.p_pos)[at];
        static_cast<T*>(a.grad_score_dst)[at] =
            (T(1) - static_cast<T>(a.slope)) * (horizontal_sum<T, N>(positive) - delta * p_pos);
        packed[3 * v * heads + h] = static_cast<const T*>(a.score_dst)[at];
        packed[(3 * v + 1) * heads + h] = static_cast<const T*>(a.lse)[at];
        packed[(3 * v + 2) * heads + h] = delta;
      }
  });
}

// For the nonzeros k0 .. k1 of source u: leaky(s) - lse, leaky' and delta.
template <int W, class T, class I>
void backward_scores(const AttentionArgs& a, const CsrOf<I>& g, const T* packed, int64_t u, int64_t k0, int64_t k1,
                     int64_t h, T* scores, T* slopes, T* deltas) {
  using V = Vec<T, W>;
  const V zero{}, one = splat<W>(T(1)), leak = splat<W>(static_cast<T>(a.slope));
  const int64_t heads = a.num_heads;
  const V base = load<W>(static_cast<const T*>(a.score_src) + u * heads + h);
  for (int64_t k = k0; k < k1; ++k) {
    const T* end = packed + 3 * static_cast<int64_t>(g.indices[k]) * heads + h;
    const int64_t i = (k - k0) * heads + h;
    const V s = base + load<W>(end);
    const V slope = s > zero ? one : leak;
    store<W>(scores + i, s * slope - load<W>(end + heads));
    store<W>(slopes + i, slope);
    store<W>(deltas + i, load<W>(end + 2 * heads));
  }
}

template <int N, class T, class I>
void backward(const AttentionArgs& a, int threads) {
  const CsrOf<I> g(a.transposed);
  const int64_t heads = a.num_heads;
  const Buffer<T> packed(3 * a.transposed.num_cols * heads);
  backward_of_destinations<N>(a, packed.get(), threads);
  const EdgeFactors<T> factor(a.factor);
  const Gather<T, I> gather{g, static_cast<const T*>(a.grad_out), static_cast<const T*>(a.x), heads, a.width};
  for_rows<T>(g, heads, a.width, 5, threads, [&](int64_t u, int64_t k0, int64_t k1, T* p, T* part) {
    const int64_t n = (k1 - k0) * heads;
    T *dots = p + n, *weights = p + 2 * n, *slopes = p + 3 * n, *deltas = p + 4 * n;
    T* grad_score = static_cast<T*>(a.grad_score_src) + u * heads;
    T* grad_x = static_cast<T*>(a.grad_x) + u * a.width;
    std::fill(grad_score, grad_score + heads, T(0));
    if (k0 == k1) {
      std::fill(grad_x, grad_x + a.width, T(0));
      return;
    }
    for_heads(heads, [&](auto lanes, int64_t h) {
      backward_scores<decltype(lanes)::value>(a, g, packed.get(), u, k0, k1, h, p, slopes, deltas);
    });
    exp_all(p, n);
    std::fill(dots, dots + n, T(0));
    const T* weighted = p;
    if (factor.any()) {
      std::copy(p, p + n, weights);
      for (int64_t k = k0; k < k1; ++k) factor.multiply(weights + (k - k0) * heads, g.edge(k), heads);
      weighted = weights;
    }
    const Sum<T> sum{weighted, grad_x};
    gather_long_row<N, true, 1>(gather, u, k0, k1, dots, &sum, part);
    for (int64_t i = 0; i < n; ++i) dots[i] = (weighted[i] * dots[i] - p[i] * deltas[i]) * slopes[i];
    for_heads(heads, [&](auto lanes, int64_t h) {
      add_columns<decltype(lanes)::value, false, T>(dots + h, dots + h, n, heads, grad_score + h);
    });
  });
}

template <class T, class I>
void run(const AttentionArgs& a) {
  const int threads = useful_threads(a.graph.nnz * (a.width + 8 * a.num_heads), a.threads);
  const auto with = [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    if (a.grad_out) return backward<N, T, I>(a, threads);
    a.out_pos ? forward<N, true, T, I>(a, threads) : forward<N, false, T, I>(a, threads);
  };
  const int64_t per_head = a.width / a.num_heads;
  if (per_head % kLanes<T> == 0) return with(std::integral_constant<int, kLanes<T>>{});
  if constexpr (kLanes<T> > 8)
    if (per_head % 8 == 0) return with(std::integral_constant<int, 8>{});
  with(std::integral_constant<int, 4>{});
}

}  // namespace

void attention(const AttentionArgs& a) {
  const bool wide = a.graph.index_type == IndexType::i64;
  if (a.dtype == DType::f64) return wide ? run<double, int64_t>(a) : run<double, int32_t>(a);
  return wide ? run<float, int64_t>(a) : run<float, int32_t>(a);
}

}  // namespace gnnaccel::GNNACCEL_ISA
