// Attention by given scores or inner products on the CPU: nothing of the size of the edges is stored. A row's scores
// are computed into a buffer that stays in cache, and again, with the saved maximum and sum, by the backward.
//   s(k, h)     = scale * <query[v, h], key[u, h]> + edge_bias[e, h], or without query and key edge_bias[e, h]
//   p(k, h)     = exp(s - m) / sum over the row of exp(s - m), m its maximum
//   out[v]      = sum over k of p * factor[e] * value[u]
//   backward, over the rows and then over the transposed rows
//     d s(k, h)     = p * (factor * <grad_out[v, h], value[u, h]> - <out[v, h], grad_out[v, h]>)
//     grad_query[v] = sum over k of scale * d s * key[u]
//     grad_key[u]   = sum over k of scale * d s * query[v],  grad_value[u] = sum over k of p * factor * grad_out[v]
#include <algorithm>
#include <type_traits>

#include "gather.h"
#include "isa.h"
#include "simd_exp.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

template <class T, class I>
struct Problem {
  CsrOf<I> graph;
  const T* query;
  const T* key;
  const T* value;
  const T* edge_bias;
  EdgeFactors<T> factor;
  T* out;
  T* stats;
  const T* ends;
  const T* grad_out;
  T* grad_query;
  T* grad_key;
  T* grad_value;
  T* grad_scores;
  T scale;
  int64_t heads, width;

  explicit Problem(const DotAttentionArgs& a)
      : graph(a.graph),
        query(static_cast<const T*>(a.given.query)),
        key(static_cast<const T*>(a.given.key)),
        value(static_cast<const T*>(a.given.value)),
        edge_bias(static_cast<const T*>(a.given.edge_bias)),
        factor(a.given.factor),
        out(static_cast<T*>(a.given.out)),
        stats(static_cast<T*>(a.given.stats)),
        ends(static_cast<const T*>(a.given.ends)),
        grad_out(static_cast<const T*>(a.given.grad_out)),
        grad_query(static_cast<T*>(a.given.grad_query)),
        grad_key(static_cast<T*>(a.given.grad_key)),
        grad_value(static_cast<T*>(a.given.grad_value)),
        grad_scores(static_cast<T*>(a.given.grad_scores)),
        scale(static_cast<T>(a.given.scale)),
        heads(a.given.num_heads),
        width(a.given.width) {}

  // Multiplies weights[k - k0, h] with the factors of their edges.
  void multiply(T* weights, int64_t k0, int64_t k1) const {
    if (!factor.any()) return;
    for (int64_t k = k0; k < k1; ++k) factor.multiply(weights + (k - k0) * heads, graph.edge(k), heads);
  }
};

// dots[k - k0, h] = <gathered of k, resident of the row> in head h.
template <int N, class T, class I>
void dots_of_row(const Problem<T, I>& p, const T* gathered, const T* resident, int64_t row, int64_t k0, int64_t k1,
                 T* dots) {
  std::fill(dots, dots + (k1 - k0) * p.heads, T(0));
  const Gather<T, I> gather{p.graph, gathered, resident, p.heads, p.width};
  gather_row<N, true, 0>(gather, row, k0, k1, dots, static_cast<const Sum<T>*>(nullptr));
}

// out = sum over the row of weights[k - k0, h] * gathered of k.
template <int N, class T, class I>
void sum_of_row(const Problem<T, I>& p, const T* gathered, int64_t row, int64_t k0, int64_t k1, const T* weights,
                T* out, T* part) {
  const Gather<T, I> gather{p.graph, gathered, nullptr, p.heads, p.width};
  const Sum<T> sum{weights, out};
  gather_long_row<N, false, 1>(gather, row, k0, k1, static_cast<T*>(nullptr), &sum, part);
}

// scores[k - k0, h] = s of the nonzeros of `row`, whose own end is `resident`. Scaled in a loop of its own: the
// compiler would join the product with what follows in one operation, not everywhere the same one.
template <int N, class T, class I>
void scores_of_row(const Problem<T, I>& p, const T* gathered, const T* resident, int64_t row, int64_t k0, int64_t k1,
                   T* scores) {
  if (p.query) {
    dots_of_row<N>(p, gathered, resident, row, k0, k1, scores);
    for (int64_t i = 0; i < (k1 - k0) * p.heads; ++i) scores[i] *= p.scale;
  }
  if (!p.edge_bias) return;
  for (int64_t k = k0; k < k1; ++k) {
    const T* bias = p.edge_bias + p.graph.edge(k) * p.heads;
    T* to = scores + (k - k0) * p.heads;
    for (int64_t h = 0; h < p.heads; ++h) to[h] = p.query ? to[h] + bias[h] : bias[h];
  }
}

template <int N, class T, class I>
void forward(const Problem<T, I>& p, int threads) {
  for_rows<T>(p.graph, p.heads, p.width, 1, threads, [&](int64_t v, int64_t k0, int64_t k1, T* weights, T* part) {
    T *out = p.out + v * p.width, *stats = p.stats + 2 * v * p.heads;
    if (k0 == k1) {
      std::fill(stats, stats + 2 * p.heads, T(0));
      std::fill(out, out + p.width, T(0));
      return;
    }
    scores_of_row<N>(p, p.key, p.query, v, k0, k1, weights);
    softmax_rows(weights, k1 - k0, p.heads, [&](int64_t h, T top, T sum) {
      stats[2 * h] = top;
      stats[2 * h + 1] = T(1) / sum;
    });
    p.multiply(weights, k0, k1);
    sum_of_row<N>(p, p.value, v, k0, k1, weights, out, part);
  });
}

// Scores become probabilities, and `products` of value and gradient the gradients of the scores; ends_of(k) is the
// destination's end of nonzero k.
template <class T, class I, class Ends>
void to_gradients(const Problem<T, I>& p, int64_t k0, int64_t k1, T* scores, T* products, const Ends& ends_of) {
  p.multiply(products, k0, k1);
  for (int64_t k = k0, i = 0; k < k1; ++k)
    for (int64_t h = 0; h < p.heads; ++h, ++i) scores[i] -= ends_of(k)[4 * h];
  exp_all(scores, (k1 - k0) * p.heads);
  for (int64_t k = k0, i = 0; k < k1; ++k)
    for (int64_t h = 0; h < p.heads; ++h, ++i) {
      scores[i] *= ends_of(k)[4 * h + 1];
      products[i] = scores[i] * (products[i] - ends_of(k)[4 * h + 2]);
    }
}

template <int N, class T, class I>
void backward_rows(const Problem<T, I>& p, int threads) {
  for_rows<T>(p.graph, p.heads, p.width, 2, threads, [&](int64_t v, int64_t k0, int64_t k1, T* scores, T* part) {
    const int64_t n = (k1 - k0) * p.heads;
    T *products = scores + n, *grad = p.grad_query + v * p.width;
    if (k0 == k1) {
      std::fill(grad, grad + p.width, T(0));
      return;
    }
    scores_of_row<N>(p, p.key, p.query, v, k0, k1, scores);
    dots_of_row<N>(p, p.value, p.grad_out, v, k0, k1, products);
    to_gradients(p, k0, k1, scores, products, [&](int64_t) { return p.ends + 4 * v * p.heads; });
    for (int64_t i = 0; i < n; ++i) products[i] *= p.scale;
    sum_of_row<N>(p, p.key, v, k0, k1, products, grad, part);
  });
}

template <int N, class T, class I>
void backward_columns(const Problem<T, I>& p, int threads) {
  for_rows<T>(p.graph, p.heads, p.width, 2, threads, [&](int64_t u, int64_t k0, int64_t k1, T* scores, T* part) {
    const int64_t n = (k1 - k0) * p.heads;
    T *products = scores + n, *grad_key = p.query ? p.grad_key + u * p.width : nullptr;
    T* grad_value = p.grad_value + u * p.width;
    if (k0 == k1) {
      if (grad_key) std::fill(grad_key, grad_key + p.width, T(0));
      std::fill(grad_value, grad_value + p.width, T(0));
      return;
    }
    scores_of_row<N>(p, p.query, p.key, u, k0, k1, scores);
    dots_of_row<N>(p, p.grad_out, p.value, u, k0, k1, products);
    to_gradients(p, k0, k1, scores, products,
                 [&](int64_t k) { return p.ends + 4 * static_cast<int64_t>(p.graph.indices[k]) * p.heads; });
    // The gradient of the bias where there is one, else of the inner products.
    auto write = [&] {
      for (int64_t k = k0; k < k1; ++k) {
        const T* from = products + (k - k0) * p.heads;
        std::copy(from, from + p.heads, p.grad_scores + p.graph.edge(k) * p.heads);
      }
    };
    if (p.grad_scores && p.edge_bias) write();
    if (p.query) {
      for (int64_t i = 0; i < n; ++i) products[i] *= p.scale;
      if (p.grad_scores && !p.edge_bias) write();
      sum_of_row<N>(p, p.query, u, k0, k1, products, grad_key, part);
    }
    p.multiply(scores, k0, k1);
    sum_of_row<N>(p, p.grad_out, u, k0, k1, scores, grad_value, part);
  });
}

template <int N, class T>
void ends_of_rows(const DotAttentionEndsArgs& a) {
  const int64_t per_head = a.width / a.num_heads, chunk = 1024;
  const int threads = useful_threads(a.num_rows * a.width, a.threads);
  parallel_for((a.num_rows + chunk - 1) / chunk, threads, [&](int64_t t) {
    for (int64_t i = t * chunk * a.num_heads; i < std::min(a.num_rows, (t + 1) * chunk) * a.num_heads; ++i) {
      Vec<T, N> delta{};
      for (int64_t d = i * per_head; d < (i + 1) * per_head; d += N)
        delta += load<N>(static_cast<const T*>(a.out) + d) * load<N>(static_cast<const T*>(a.grad_out) + d);
      const T* stats = static_cast<const T*>(a.stats) + 2 * i;
      T* ends = static_cast<T*>(a.ends) + 4 * i;
      ends[0] = stats[0];
      ends[1] = stats[1];
      ends[2] = horizontal_sum<T, N>(delta);
    }
  });
}

// Calls f with the lanes of a vector as a constant: the most that heads of so many features allow.
template <class T, class F>
void with_lanes(int64_t per_head, const F& f) {
  if (per_head % kLanes<T> == 0) return f(std::integral_constant<int, kLanes<T>>{});
  if constexpr (kLanes<T> > 8)
    if (per_head % 8 == 0) return f(std::integral_constant<int, 8>{});
  f(std::integral_constant<int, 4>{});
}

template <class T, class I>
void run(const DotAttentionArgs& a) {
  const Problem<T, I> p(a);
  const int threads = useful_threads(a.graph.nnz * (2 * p.width + 8 * p.heads), a.threads);
  with_lanes<T>(p.width / p.heads, [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    switch (a.given.mode()) {
      case DotAttention::Mode::forward:
        return forward<N>(p, threads);
      case DotAttention::Mode::rows:
        return backward_rows<N>(p, threads);
      case DotAttention::Mode::columns:
        return backward_columns<N>(p, threads);
    }
  });
}

template <class T>
void run(const DotAttentionEndsArgs& a) {
  with_lanes<T>(a.width / a.num_heads, [&](auto lanes) { ends_of_rows<decltype(lanes)::value, T>(a); });
}

}  // namespace

void dot_attention(const DotAttentionArgs& a) {
  const bool wide = a.graph.index_type == IndexType::i64;
  if (a.given.dtype == DType::f64) return wide ? run<double, int64_t>(a) : run<double, int32_t>(a);
  return wide ? run<float, int64_t>(a) : run<float, int32_t>(a);
}

void dot_attention_ends(const DotAttentionEndsArgs& a) { a.dtype == DType::f64 ? run<double>(a) : run<float>(a); }

}  // namespace gnnaccel::GNNACCEL_ISA
