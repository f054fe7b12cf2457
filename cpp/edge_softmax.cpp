// Edge softmax on the CPU: a row's scores are gathered once into a buffer that stays in cache, where the
// maximum, the exponentials and the sums are taken; each score is read once and each result written once.
#include <algorithm>
#include <cmath>

#include "isa.h"
#include "rows.h"
#include "simd.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

constexpr int64_t kPrefetchAhead = 16;
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

template <class T, class I>
struct Problem {
  CsrOf<I> graph;
  const T* input;
  const T* grad_out;
  T* out;
  int64_t heads;
};

// Edge rows come in any order where the graph has edge ids.
template <class T, class I>
[[gnu::always_inline]] inline void prefetch_edge(const Problem<T, I>& p, const T* rows, int64_t k) {
  if (p.graph.edge_ids && k + kPrefetchAhead < p.graph.nnz)
    prefetch<1>(rows + static_cast<int64_t>(p.graph.edge_ids[k + kPrefetchAhead]) * p.heads);
}

// kHeads is the number of heads where it is a compile-time constant, 0 otherwise.
template <int kHeads, class T, class I>
void forward_row(const Problem<T, I>& p, int64_t begin, int64_t end, Acc<T>* scores, Acc<T>* per_head) {
  using A = Acc<T>;
  const int64_t heads = kHeads ? kHeads : p.heads;
  A* top = per_head;
  A* sum = per_head + heads;
  A* piece = per_head + 2 * heads;
  for (int64_t h = 0; h < heads; ++h) {
    top[h] = -std::numeric_limits<A>::infinity();
    sum[h] = 0;
  }
  for (int64_t k = begin; k < end; ++k) {
    prefetch_edge(p, p.input, k);
    const T* from = p.input + p.graph.edge(k) * heads;
    A* to = scores + (k - begin) * heads;
    for (int64_t h = 0; h < heads; ++h) {
      to[h] = widen(from[h]);
      top[h] = std::max(top[h], to[h]);  // a NaN score is kept in `to`, and makes its row NaN below
    }
  }
  const int64_t n = end - begin;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t h = 0; h < heads; ++h) scores[i * heads + h] -= top[h];
  exp_all(scores, n * heads);
  for (int64_t i0 = 0; i0 < n; i0 += kSumPiece) {  // a plain f32 sum over a hub would lose two digits
    const int64_t i1 = std::min(n, i0 + kSumPiece);
    for (int64_t h = 0; h < heads; ++h) piece[h] = 0;
    for (int64_t i = i0; i < i1; ++i)
      for (int64_t h = 0; h < heads; ++h) piece[h] += scores[i * heads + h];
    for (int64_t h = 0; h < heads; ++h) sum[h] += piece[h];
  }
  for (int64_t h = 0; h < heads; ++h) sum[h] = A(1) / sum[h];
  for (int64_t k = begin; k < end; ++k) {
    prefetch_edge(p, p.out, k);
    T* to = p.out + p.graph.edge(k) * heads;
    for (int64_t h = 0; h < heads; ++h) narrow(scores[(k - begin) * heads + h] * sum[h], to + h);
  }
}

template <int kHeads, class T, class I>
void backward_row(const Problem<T, I>& p, int64_t begin, int64_t end, Acc<T>*, Acc<T>* per_head) {
  const int64_t heads = kHeads ? kHeads : p.heads;
  for (int64_t h = 0; h < heads; ++h) per_head[h] = 0;
  for (int64_t k = begin; k < end; ++k) {
    prefetch_edge(p, p.input, k);
    prefetch_edge(p, p.grad_out, k);
    prefetch_edge(p, p.out, k);
    const int64_t at = p.graph.edge(k) * heads;
    for (int64_t h = 0; h < heads; ++h) per_head[h] += widen(p.input[at + h]) * widen(p.grad_out[at + h]);
  }
  for (int64_t k = begin; k < end; ++k) {
    const int64_t at = p.graph.edge(k) * heads;
    for (int64_t h = 0; h < heads; ++h)
      narrow(widen(p.input[at + h]) * (widen(p.grad_out[at + h]) - per_head[h]), p.out + at + h);
  }
}

template <int kHeads, class T, class I>
void run_heads(const Problem<T, I>& p, int threads) {
  const auto& g = p.graph;
  for_row_ranges(g, threads, [&](int64_t first, int64_t last) {
    int64_t longest = 0;
    for (int64_t row = first; row < last; ++row)
      longest = std::max<int64_t>(longest, static_cast<int64_t>(g.indptr[row + 1] - g.indptr[row]));
    const Buffer<Acc<T>> scores(p.grad_out ? 0 : longest * p.heads), per_head(3 * p.heads);
    for (int64_t row = first; row < last; ++row) {
      const int64_t begin = g.indptr[row], end = g.indptr[row + 1];
      if (p.grad_out)
        backward_row<kHeads>(p, begin, end, scores.get(), per_head.get());
      else
        forward_row<kHeads>(p, begin, end, scores.get(), per_head.get());
    }
  });
}

template <class T, class I>
void run(const EdgeSoftmaxArgs& a) {
  const Problem<T, I> p{CsrOf<I>(a.graph), static_cast<const T*>(a.input), static_cast<const T*>(a.grad_out),
                        static_cast<T*>(a.out), a.num_heads};
  // An exponential costs about as much as eight elements of a sum.
  const int threads = useful_threads(8 * a.graph.nnz * a.num_heads, a.threads);
  switch (a.num_heads) {
    case 1:
      return run_heads<1>(p, threads);
    case 4:
      return run_heads<4>(p, threads);
    case 8:
      return run_heads<8>(p, threads);
    default:
      return run_heads<0>(p, threads);
  }
}

}  // namespace

void edge_softmax(const EdgeSoftmaxArgs& a) {
  const bool wide = a.graph.index_type == IndexType::i64;
  switch (a.dtype) {
    case DType::f64:
      return wide ? run<double, int64_t>(a) : run<double, int32_t>(a);
    case DType::bf16:
      return wide ? run<bf16, int64_t>(a) : run<bf16, int32_t>(a);
    default:
      return wide ? run<float, int64_t>(a) : run<float, int32_t>(a);
  }
}

}  // namespace gnnaccel::GNNACCEL_ISA
