// Edge softmax on the CPU: a row's scores are gathered once into a buffer that stays in cache, where the
// maximum, the exponentials and the sums are taken; each score is read once and each result written once.
#include <algorithm>

#include "isa.h"
#include "rows.h"
#include "simd.h"
#include "simd_exp.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

constexpr int64_t kScoresAhead = 16;  // a few bytes each: more of them fit in flight than rows of features

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
  if (p.graph.edge_ids && k + kScoresAhead < p.graph.nnz)
    prefetch<1>(rows + static_cast<int64_t>(p.graph.edge_ids[k + kScoresAhead]) * p.heads);
}

// kHeads is the number of heads where it is a compile-time constant, 0 otherwise.
template <int kHeads, class T, class I>
void forward_row(const Problem<T, I>& p, int64_t begin, int64_t end, Acc<T>* scores) {
  const int64_t heads = kHeads ? kHeads : p.heads;
  for (int64_t k = begin; k < end; ++k) {
    prefetch_edge(p, p.input, k);
    const T* from = p.input + p.graph.edge(k) * heads;
    for (int64_t h = 0; h < heads; ++h) scores[(k - begin) * heads + h] = widen(from[h]);
  }
  softmax_rows(scores, end - begin, heads, [](int64_t, Acc<T>, Acc<T>) {});
  for (int64_t k = begin; k < end; ++k) {
    prefetch_edge(p, p.out, k);
    T* to = p.out + p.graph.edge(k) * heads;
    for (int64_t h = 0; h < heads; ++h) narrow(scores[(k - begin) * heads + h], to + h);
  }
}

template <int kHeads, class T, class I>
void backward_row(const Problem<T, I>& p, int64_t begin, int64_t end, double* per_head) {
  const int64_t heads = kHeads ? kHeads : p.heads;
  for (int64_t h = 0; h < heads; ++h) per_head[h] = 0;
  for (int64_t k = begin; k < end; ++k) {
    prefetch_edge(p, p.input, k);
    prefetch_edge(p, p.grad_out, k);
    prefetch_edge(p, p.out, k);
    const int64_t at = p.graph.edge(k) * heads;
    for (int64_t h = 0; h < heads; ++h) per_head[h] += widen(p.input[at + h]) * widen(p.grad_out[at + h]);
  }  // in f64: of a hub it is the sum of millions
  for (int64_t k = begin; k < end; ++k) {
    const int64_t at = p.graph.edge(k) * heads;
    for (int64_t h = 0; h < heads; ++h)
      narrow(widen(p.input[at + h]) * (widen(p.grad_out[at + h]) - static_cast<Acc<T>>(per_head[h])), p.out + at + h);
  }
}

template <int kHeads, class T, class I>
void run_heads(const Problem<T, I>& p, int threads) {
  const auto& g = p.graph;
  for_row_ranges(g, threads, [&](int64_t first, int64_t last) {
    int64_t longest = 0;
    for (int64_t row = first; row < last; ++row)
      longest = std::max<int64_t>(longest, static_cast<int64_t>(g.indptr[row + 1] - g.indptr[row]));
    const Buffer<Acc<T>> scores(p.grad_out ? 0 : longest * p.heads);
    const Buffer<double> per_head(p.heads);
    for (int64_t row = first; row < last; ++row) {
      const int64_t begin = g.indptr[row], end = g.indptr[row + 1];
      if (begin == end) continue;
      if (p.grad_out)
        backward_row<kHeads>(p, begin, end, per_head.get());
      else
        forward_row<kHeads>(p, begin, end, scores.get());
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
