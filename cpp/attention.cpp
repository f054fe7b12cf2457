// Additive graph attention (GAT) on the CPU, one pass over the rows forward, two backward; nothing of the
// size of the edges is stored. A row's scores are computed into a buffer that stays in cache, and the
// probabilities of the backward are recomputed from the row's saved log-sum-exp.
//   p(k, h)    = exp(leaky(score_src[u, h] + score_dst[v, h]) - lse[v, h])
//   out[v, h]  = sum over k of p * edge_scale[e, h] * x[u, h]
//   backward   d score(k, h) = p * (edge_scale * <x[u, h], grad_out[v, h]> - delta[v, h]) * leaky'
// Pass one walks the rows (sum of d score into score_dst), pass two the transposed rows (grad_x, score_src).
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "isa.h"
#include "rows.h"
#include "simd.h"
#include "simd_exp.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

constexpr int64_t kPrefetchAhead = 8;

// What every pass over rows needs: `graph` is the matrix or its transpose, `gathered` the features read
// through its indices, `resident` those of the row itself.
template <class T, class I>
struct Pass {
  CsrOf<I> graph;
  const T* gathered;
  const T* resident;
  int64_t heads, width;  // width = heads * features per head

  int64_t head_of(int64_t d) const { return d / (width / heads); }
};

// Features d .. d + N * M of the nonzeros k0 .. k1: adds <gathered, resident> per head to dots[k - k0, h],
// and returns the sum of weights[k - k0, h] * gathered in out. P vectors in a row belong to one head.
template <int N, int M, int P, bool kDots, bool kSum, class T, class I>
void block(const Pass<T, I>& p, int64_t row, int64_t k0, int64_t k1, int64_t d, T* dots, const T* weights, T* out) {
  using V = Vec<T, N>;
  int64_t head[M / P];
  for (int h = 0; h < M / P; ++h) head[h] = p.head_of(d + h * P * N);
  V resident[M], acc[M];
  for (int m = 0; m < M; ++m) {
    acc[m] = V{};
    resident[m] = kDots ? load<N>(p.resident + row * p.width + d + m * N) : V{};
  }
  for (int64_t k = k0; k < k1; ++k) {
    if (k + kPrefetchAhead < p.graph.nnz)
      prefetch<N * M * sizeof(T)>(p.gathered + static_cast<int64_t>(p.graph.indices[k + kPrefetchAhead]) * p.width + d);
    const T* x = p.gathered + static_cast<int64_t>(p.graph.indices[k]) * p.width + d;
    const int64_t at = (k - k0) * p.heads;
#pragma GCC unroll 8
    for (int h = 0; h < M / P; ++h) {
      V dot{};
      const V weight = kSum ? splat<N>(weights[at + head[h]]) : V{};
#pragma GCC unroll 8
      for (int m = h * P; m < (h + 1) * P; ++m) {
        const V value = load<N>(x + m * N);
        if constexpr (kDots) dot += value * resident[m];
        if constexpr (kSum) acc[m] += value * weight;
      }
      if constexpr (kDots) dots[at + head[h]] += horizontal_sum<T, N>(dot);
    }
  }
  if constexpr (kSum)
    for (int m = 0; m < M; ++m) store<N>(out + d + m * N, acc[m]);
}

template <int N, int M, bool kDots, bool kSum, class T, class I>
void block_of(const Pass<T, I>& p, int64_t row, int64_t k0, int64_t k1, int64_t d, T* dots, const T* weights, T* out) {
  const int64_t per_head = p.width / p.heads / N;  // vectors to a head, at least one
  const bool inside = d / (per_head * N) == (d + M * N - 1) / (per_head * N);
  if (inside) return block<N, M, M, kDots, kSum>(p, row, k0, k1, d, dots, weights, out);
  if constexpr (M >= 4)
    if (per_head % 4 == 0 && d % (4 * N) == 0)
      return block<N, M, 4, kDots, kSum>(p, row, k0, k1, d, dots, weights, out);
  if constexpr (M >= 2)
    if (per_head % 2 == 0 && d % (2 * N) == 0)
      return block<N, M, 2, kDots, kSum>(p, row, k0, k1, d, dots, weights, out);
  block<N, M, 1, kDots, kSum>(p, row, k0, k1, d, dots, weights, out);
}

template <int N, bool kDots, bool kSum, class T, class I>
void whole_row(const Pass<T, I>& p, int64_t row, int64_t k0, int64_t k1, T* dots, const T* weights, T* out) {
  int64_t d = 0;
  for (; d + 8 * N <= p.width; d += 8 * N) block_of<N, 8, kDots, kSum>(p, row, k0, k1, d, dots, weights, out);
  for (; d + 4 * N <= p.width; d += 4 * N) block_of<N, 4, kDots, kSum>(p, row, k0, k1, d, dots, weights, out);
  for (; d + 2 * N <= p.width; d += 2 * N) block_of<N, 2, kDots, kSum>(p, row, k0, k1, d, dots, weights, out);
  for (; d < p.width; d += N) block_of<N, 1, kDots, kSum>(p, row, k0, k1, d, dots, weights, out);
}

// One end of the edges: its scores, and in the backward the lse and delta of the destinations (else null).
template <class T>
struct End {
  const T* score;
  const T* lse;
  const T* delta;
};

// For nonzeros k0 .. k1 of a row: score[k - k0, h] = leaky(mine + theirs) - lse, with `mine` the row's end and
// `theirs` gathered. With kBackward also slopes (leaky') and deltas. W heads at a time.
template <int W, bool kBackward, class T, class I>
void row_scores(const CsrOf<I>& g, int64_t heads, T slope, const End<T>& mine, const End<T>& theirs, int64_t row,
                int64_t k0, int64_t k1, T* scores, T* slopes, T* deltas) {
  using V = Vec<T, W>;
  const V zero{}, one = splat<W>(T(1)), leak = splat<W>(slope);
  for (int64_t h = 0; h < heads; h += W) {
    const int64_t at_row = row * heads + h;
    const V base = load<W>(mine.score + at_row);
    const V lse_row = mine.lse ? load<W>(mine.lse + at_row) : zero;
    const V delta_row = mine.delta ? load<W>(mine.delta + at_row) : zero;
    for (int64_t k = k0; k < k1; ++k) {
      const int64_t at = static_cast<int64_t>(g.indices[k]) * heads + h, i = (k - k0) * heads + h;
      const V s = base + load<W>(theirs.score + at);
      const V factor = s > zero ? one : leak;
      const V value = s * factor;
      if constexpr (kBackward) {
        store<W>(scores + i, value - (theirs.lse ? load<W>(theirs.lse + at) : lse_row));
        store<W>(slopes + i, factor);
        store<W>(deltas + i, theirs.delta ? load<W>(theirs.delta + at) : delta_row);
      } else {
        store<W>(scores + i, value);
      }
    }
  }
}

template <bool kBackward, class T, class I, class... Rest>
void scores_of_row(const CsrOf<I>& g, int64_t heads, Rest... rest) {
  if (heads % 4 == 0)
    row_scores<4, kBackward, T>(g, heads, rest...);
  else
    row_scores<1, kBackward, T>(g, heads, rest...);
}

// body(row, k0, k1, scratch) with scratch for `arrays` values per head and nonzero of the longest row.
template <class T, class I, class Body>
void for_rows(const CsrOf<I>& g, int64_t heads, int arrays, int threads, const Body& body) {
  for_row_ranges(g, threads, [&](int64_t first, int64_t last) {
    int64_t longest = 1;
    for (int64_t row = first; row < last; ++row)
      longest = std::max<int64_t>(longest, static_cast<int64_t>(g.indptr[row + 1] - g.indptr[row]));
    const Buffer<T> scratch(longest * heads * arrays);
    for (int64_t row = first; row < last; ++row)
      body(row, static_cast<int64_t>(g.indptr[row]), static_cast<int64_t>(g.indptr[row + 1]), scratch.get());
  });
}

template <int N, class T, class I>
void forward(const AttentionArgs& a, int threads) {
  const CsrOf<I> g(a.graph);
  const int64_t heads = a.num_heads;
  const auto* scale = static_cast<const T*>(a.edge_scale);
  const Pass<T, I> pass{g, static_cast<const T*>(a.x), nullptr, heads, a.width};
  const End<T> src{static_cast<const T*>(a.score_src), nullptr, nullptr};
  const End<T> dst{static_cast<const T*>(a.score_dst), nullptr, nullptr};
  for_rows<T>(g, heads, 1, threads, [&](int64_t v, int64_t k0, int64_t k1, T* p) {
    T* out = static_cast<T*>(a.out) + v * a.width;
    T* lse = static_cast<T*>(a.lse) + v * heads;
    if (k0 == k1) {
      std::fill(out, out + a.width, T(0));
      std::fill(lse, lse + heads, T(0));
      return;
    }
    T* const none = nullptr;
    scores_of_row<false, T>(g, heads, static_cast<T>(a.slope), dst, src, v, k0, k1, p, none, none);
    softmax_rows(p, k1 - k0, heads, lse);
    if (scale)
      for (int64_t k = k0; k < k1; ++k)
        for (int64_t h = 0; h < heads; ++h) p[(k - k0) * heads + h] *= scale[g.edge(k) * heads + h];
    whole_row<N, false, true>(pass, v, k0, k1, static_cast<T*>(nullptr), p, out);
  });
}

// One backward pass. Over the rows: `mine` is the destination. Over the transpose: the source, with grad_x.
template <int N, bool kTransposed, class T, class I>
void backward(const AttentionArgs& a, int threads) {
  const CsrOf<I> g(kTransposed ? a.transposed : a.graph);
  const int64_t heads = a.num_heads;
  const T slope = static_cast<T>(a.slope);
  const End<T> src{static_cast<const T*>(a.score_src), nullptr, nullptr};
  const End<T> dst{static_cast<const T*>(a.score_dst), static_cast<const T*>(a.lse), static_cast<const T*>(a.delta)};
  const auto* scale = static_cast<const T*>(a.edge_scale);
  const auto* x = static_cast<const T*>(a.x);
  const auto* grad = static_cast<const T*>(a.grad_out);
  const Pass<T, I> pass{g, kTransposed ? grad : x, kTransposed ? x : grad, heads, a.width};
  for_rows<T>(g, heads, 5, threads, [&](int64_t row, int64_t k0, int64_t k1, T* p) {
    const int64_t n = (k1 - k0) * heads;
    T *dots = p + n, *weights = p + 2 * n, *slopes = p + 3 * n, *deltas = p + 4 * n;
    T* grad_score = static_cast<T*>(kTransposed ? a.grad_score_src : a.grad_score_dst) + row * heads;
    T* grad_x = static_cast<T*>(a.grad_x) + row * a.width;
    std::fill(grad_score, grad_score + heads, T(0));
    if (k0 == k1) {
      if (kTransposed) std::fill(grad_x, grad_x + a.width, T(0));
      return;
    }
    scores_of_row<true, T>(g, heads, slope, kTransposed ? src : dst, kTransposed ? dst : src, row, k0, k1, p, slopes,
                           deltas);
    exp_all(p, n);
    std::fill(dots, dots + n, T(0));
    if (scale)
      for (int64_t k = k0; k < k1; ++k)
        for (int64_t h = 0; h < heads; ++h)
          weights[(k - k0) * heads + h] = p[(k - k0) * heads + h] * scale[g.edge(k) * heads + h];
    const T* factors = scale ? weights : p;
    whole_row<N, true, kTransposed>(pass, row, k0, k1, dots, factors, grad_x);
    for (int64_t i = 0; i < n; ++i) dots[i] = (factors[i] * dots[i] - p[i] * deltas[i]) * slopes[i];
    for (int64_t i = 0; i < n; i += heads)
      for (int64_t h = 0; h < heads; ++h) grad_score[h] += dots[i + h];
  });
}

template <class T, class I>
void run(const AttentionArgs& a) {
  const int threads = useful_threads(a.graph.nnz * (a.width + 8 * a.num_heads), a.threads);
  const auto with = [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    if (!a.grad_out) return forward<N, T, I>(a, threads);
    backward<N, false, T, I>(a, threads);
    backward<N, true, T, I>(a, threads);
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
