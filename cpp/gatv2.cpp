// The edge scores of GATv2 on the CPU, and the sums over rows that are their gradients. With l = x[c] + y[r] for a
// nonzero (r, c, e), leaky(l) = l * k(l), k(l) = 1 where l > 0, else slope:
//   out[e, h]     = sum over the features f of head h of vectors[h, f] * l * k
//   sums[r]       = vectors * sum over the row of weights[e, h] * k
//   products[r]   = sum over the row of weights[e, h] * l * k
// [nnz, width] exists nowhere. Rows longer than kShortPiece are summed in pieces, as in spmm.cpp.
#include <algorithm>
#include <type_traits>

#include "isa.h"
#include "rows.h"
#include "simd.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

template <class T, class I>
struct Problem {
  CsrOf<I> graph;
  const T* x;
  const T* y;
  const T* vectors;
  const T* weights;
  T* out;
  T* sums;
  T* products;
  T slope;
  int64_t heads, width, per_head;

  explicit Problem(const Gatv2Args& a)
      : graph(a.graph),
        x(static_cast<const T*>(a.x)),
        y(static_cast<const T*>(a.y)),
        vectors(static_cast<const T*>(a.vectors)),
        weights(static_cast<const T*>(a.weights)),
        out(static_cast<T*>(a.out)),
        sums(static_cast<T*>(a.sums)),
        products(static_cast<T*>(a.products)),
        slope(static_cast<T>(a.slope)),
        heads(a.num_heads),
        width(a.width),
        per_head(a.width / a.num_heads) {}

  const T* source(int64_t k) const { return x + static_cast<int64_t>(graph.indices[k]) * width; }
};

template <int N, class T, class I>
void score_row(const Problem<T, I>& p, int64_t row) {
  using V = Vec<T, N>;
  const V slope = splat<N>(p.slope);
  const T* y = p.y + row * p.width;
  for (int64_t k = p.graph.indptr[row]; k < p.graph.indptr[row + 1]; ++k) {
    if (k + kPrefetchAhead < p.graph.nnz) prefetch<256>(p.source(k + kPrefetchAhead));
    const T* x = p.source(k);
    T* out = p.out + p.graph.edge(k) * p.heads;
    for (int64_t h = 0; h < p.heads; ++h) {
      V dot{};
      for (int64_t d = h * p.per_head; d < (h + 1) * p.per_head; d += N) {
        const V l = load<N>(x + d) + load<N>(y + d);
        dot += (l > V{} ? l : l * slope) * load<N>(p.vectors + d);
      }
      out[h] = horizontal_sum<T, N>(dot);
    }
  }
}

// Features d .. d + N * M of one row.
template <int N, int M, bool kProducts, class T, class I>
void sum_block(const Problem<T, I>& p, int64_t row, int64_t d) {
  using V = Vec<T, N>;
  const V one = splat<N>(T(1)), slope = splat<N>(p.slope);
  V y[M], sum[M], product[M];
  int64_t head[M];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    y[m] = load<N>(p.y + row * p.width + d + m * N);
    sum[m] = product[m] = V{};
    head[m] = (d + m * N) / p.per_head;
  }
  const int64_t end = p.graph.indptr[row + 1];
  V many[M], many_product[M];  // of kMany pieces
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) many[m] = many_product[m] = V{};
  int64_t pieces = 0;
  for (int64_t first = p.graph.indptr[row]; first < end; first += kShortPiece) {
    V part[M], part_product[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) part[m] = part_product[m] = V{};
    for (int64_t k = first; k < std::min(end, first + kShortPiece); ++k) {
      if (k + kPrefetchAhead < p.graph.nnz) prefetch<N * M * sizeof(T)>(p.source(k + kPrefetchAhead) + d);
      const T* x = p.source(k) + d;
      const T* weights = p.weights + p.graph.edge(k) * p.heads;
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const V l = load<N>(x + m * N) + y[m];
        const V share = (l > V{} ? one : slope) * splat<N>(weights[head[m]]);
        part[m] += share;
        if constexpr (kProducts) part_product[m] += share * l;
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      many[m] += part[m];
      many_product[m] += part_product[m];
    }
    if (++pieces % kMany && first + kShortPiece < end) continue;
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      sum[m] += many[m];
      product[m] += many_product[m];
      many[m] = many_product[m] = V{};
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    store<N>(p.sums + row * p.width + d + m * N, sum[m] * load<N>(p.vectors + d + m * N));
    if constexpr (kProducts) store<N>(p.products + row * p.width + d + m * N, product[m]);
  }
}

template <int N, bool kProducts, class T, class I>
void sum_row(const Problem<T, I>& p, int64_t row) {
  int64_t d = 0;
  for (; d + 4 * N <= p.width; d += 4 * N) sum_block<N, 4, kProducts>(p, row, d);
  for (; d + 2 * N <= p.width; d += 2 * N) sum_block<N, 2, kProducts>(p, row, d);
  for (; d < p.width; d += N) sum_block<N, 1, kProducts>(p, row, d);
}

template <int N, class T, class I>
void walk(const Problem<T, I>& p, int threads) {
  for_row_ranges(p.graph, threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      if (p.out)
        score_row<N>(p, row);
      else if (p.products)
        sum_row<N, true>(p, row);
      else
        sum_row<N, false>(p, row);
    }
  });
}

template <class T, class I>
void run(const Gatv2Args& a) {
  const Problem<T, I> p(a);
  const int threads = useful_threads((a.graph.nnz + a.graph.num_rows) * a.width, a.threads);
  if (p.per_head % kLanes<T> == 0) return walk<kLanes<T>>(p, threads);
  if constexpr (kLanes<T> > 8)
    if (p.per_head % 8 == 0) return walk<8>(p, threads);
  walk<4>(p, threads);
}

}  // namespace

void gatv2(const Gatv2Args& a) {
  const bool wide = a.graph.index_type == IndexType::i64;
  if (a.dtype == DType::f64) return wide ? run<double, int64_t>(a) : run<double, int32_t>(a);
  return wide ? run<float, int64_t>(a) : run<float, int32_t>(a);
}

}  // namespace gnnaccel::GNNACCEL_ISA
