// Both gradients of a weighted sum, out[r] = sum over k of weight[e] * x[c], in one walk over the transposed rows:
// the gradient rows gathered for grad_x are dotted with the resident x while they are in registers. That is two
// thirds of the traffic of an SpMM and an SDDMM of their own. Rows are cut into pieces as in spmm.cpp, and the
// pieces of a hub run in parallel.
#include <algorithm>
#include <type_traits>

#include "gather.h"
#include "isa.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

template <class T, class I>
struct Problem {
  Gather<T, I> gather;
  const T* weight;
  T* grad_x;
  T* grad_weight;
};

// Nonzeros k0 .. k1 (at most kPiece): their part of the row's grad_x into out, their grad_weight.
template <int N, class T, class I>
void piece(const Problem<T, I>& p, int64_t row, int64_t k0, int64_t k1, T* scratch, T* out) {
  const CsrOf<I>& g = p.gather.graph;
  const int64_t heads = p.gather.heads;
  T *weights = scratch, *dots = scratch + kPiece * heads;
  for (int64_t k = k0; k < k1; ++k) {
    const int64_t e = g.edge(k);
    for (int64_t h = 0; h < heads; ++h) weights[(k - k0) * heads + h] = p.weight[e * heads + h];
  }
  std::fill(dots, dots + (k1 - k0) * heads, T(0));
  const Sum<T> sum{weights, out};
  gather_row<N, true, 1>(p.gather, row, k0, k1, dots, &sum);
  for (int64_t k = k0; k < k1; ++k) {
    const int64_t e = g.edge(k);
    for (int64_t h = 0; h < heads; ++h) p.grad_weight[e * heads + h] = dots[(k - k0) * heads + h];
  }
}

// One row after another piece; `part` has room for one row.
template <int N, class T, class I>
void whole_row(const Problem<T, I>& p, int64_t row, T* scratch, T* part) {
  const CsrOf<I>& g = p.gather.graph;
  const int64_t begin = g.indptr[row], end = g.indptr[row + 1], width = p.gather.width;
  T* out = p.grad_x + row * width;
  if (begin == end) std::fill(out, out + width, T(0));
  for (int64_t k = begin; k < end; k += kPiece) {
    piece<N>(p, row, k, std::min(end, k + kPiece), scratch, k == begin ? out : part);
    if (k != begin) add_to(out, part, width);
  }
}

template <int N, class T, class I>
void hub_row(const Problem<T, I>& p, int64_t row, int threads) {
  const CsrOf<I>& g = p.gather.graph;
  const int64_t begin = g.indptr[row], end = g.indptr[row + 1], width = p.gather.width;
  const int64_t count = (end - begin + kPiece - 1) / kPiece;
  const Buffer<T> parts(count * width);
  parallel_for(count, threads, [&](int64_t i) {
    const Buffer<T> scratch(2 * kPiece * p.gather.heads);
    const int64_t k = begin + i * kPiece;
    piece<N>(p, row, k, std::min(end, k + kPiece), scratch.get(), parts.get() + i * width);
  });
  T* out = p.grad_x + row * width;
  for (int64_t d = 0; d < width; ++d) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += parts[i * width + d];
    out[d] = static_cast<T>(sum);
  }
}

template <int N, class T, class I>
void walk(const Problem<T, I>& p, int threads) {
  const CsrOf<I>& g = p.gather.graph;
  const auto is_hub = [&](int64_t row) { return g.indptr[row + 1] - g.indptr[row] > kHubRow; };
  for_row_ranges(g, threads, [&](int64_t first, int64_t last) {
    const Buffer<T> scratch(2 * kPiece * p.gather.heads + p.gather.width);
    T* part = scratch.get() + 2 * kPiece * p.gather.heads;
    for (int64_t row = first; row < last; ++row)
      if (!is_hub(row)) whole_row<N>(p, row, scratch.get(), part);
  });
  if (g.nnz <= kHubRow) return;
  for (int64_t row = 0; row < g.num_rows; ++row)
    if (is_hub(row)) hub_row<N>(p, row, threads);
}

template <class T, class I>
void run(const SpmmBackwardArgs& a) {
  const Problem<T, I> p{
      {CsrOf<I>(a.transposed), static_cast<const T*>(a.grad_out), static_cast<const T*>(a.x), a.num_heads, a.width},
      static_cast<const T*>(a.weight),
      static_cast<T*>(a.grad_x),
      static_cast<T*>(a.grad_weight)};
  const int threads = useful_threads((a.transposed.nnz + a.transposed.num_rows) * a.width, a.threads);
  const int64_t per_head = a.width / a.num_heads;
  if (per_head % kLanes<T> == 0) return walk<kLanes<T>>(p, threads);
  if constexpr (kLanes<T> > 8)
    if (per_head % 8 == 0) return walk<8>(p, threads);
  walk<4>(p, threads);
}

}  // namespace

void spmm_backward(const SpmmBackwardArgs& a) {
  const bool wide = a.transposed.index_type == IndexType::i64;
  if (a.dtype == DType::f64) return wide ? run<double, int64_t>(a) : run<double, int32_t>(a);
  return wide ? run<float, int64_t>(a) : run<float, int32_t>(a);
}

}  // namespace gnnaccel::GNNACCEL_ISA
