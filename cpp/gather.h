// The inner loop of the fused kernels: the rows of one feature matrix gathered through a matrix row's indices,
// dotted per head with a resident row, summed with weights per head, or both while they are in registers.
#pragma once

#include <algorithm>

#include "rows.h"
#include "simd.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

// What every row of one walk needs: `gathered` is read through the graph's indices, `resident` at the row itself.
// Vectors of N features must not straddle heads: width / heads is a multiple of N.
template <class T, class I>
struct Gather {
  CsrOf<I> graph;
  const T* gathered;
  const T* resident;
  int64_t heads, width;  // width = heads * features per head

  // The head of feature d, and of each `step` features further on: a division per row costs what several edges do.
  template <int kCount>
  void heads_from(int64_t d, int step, int64_t (&head)[kCount]) const {
    const int64_t per_head = width / heads;
    int64_t h = d ? d / per_head : 0, rest = d - h * per_head;
    for (int i = 0; i < kCount; ++i) {
      head[i] = h;
      rest += step;
      if (rest >= per_head) rest = 0, ++h;
    }
  }
};

// A weighted sum of gathered rows: weights [nonzeros of the row, heads], out [width].
template <class T>
struct Sum {
  const T* weights;
  T* out;
};

// Features d .. d + N * M of the nonzeros k0 .. k1: adds <gathered, resident> per head to dots[k - k0, h],
// and writes kSums weighted sums. P vectors in a row belong to one head.
template <int N, int M, int P, bool kDots, int kSums, class T, class I>
void gather_block(const Gather<T, I>& p, int64_t row, int64_t k0, int64_t k1, int64_t d, T* dots, const Sum<T>* sums) {
  using V = Vec<T, N>;
  constexpr int kOuts = kSums ? kSums : 1;
  int64_t head[M / P];
  if constexpr (M == P)
    head[0] = p.heads == 1 ? 0 : d / (p.width / p.heads);
  else
    p.heads_from(d, P * N, head);
  V resident[M], acc[kOuts][M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    resident[m] = kDots ? load<N>(p.resident + row * p.width + d + m * N) : V{};
#pragma GCC unroll 2
    for (int s = 0; s < kOuts; ++s) acc[s][m] = V{};
  }
  for (int64_t k = k0; k < k1; ++k) {
    if (k + kPrefetchAhead < p.graph.nnz)
      prefetch<N * M * sizeof(T)>(p.gathered + static_cast<int64_t>(p.graph.indices[k + kPrefetchAhead]) * p.width + d);
    const T* x = p.gathered + static_cast<int64_t>(p.graph.indices[k]) * p.width + d;
    const int64_t at = (k - k0) * p.heads;
#pragma GCC unroll 8
    for (int h = 0; h < M / P; ++h) {
      V dot{}, weight[kOuts];
#pragma GCC unroll 2
      for (int s = 0; s < kSums; ++s) weight[s] = splat<N>(sums[s].weights[at + head[h]]);
#pragma GCC unroll 8
      for (int m = h * P; m < (h + 1) * P; ++m) {
        const V value = load<N>(x + m * N);
        if constexpr (kDots) dot += value * resident[m];
#pragma GCC unroll 2
        for (int s = 0; s < kSums; ++s) acc[s][m] += value * weight[s];
      }
      if constexpr (kDots) dots[at + head[h]] += horizontal_sum<T, N>(dot);
    }
  }
#pragma GCC unroll 2
  for (int s = 0; s < kSums; ++s)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) store<N>(sums[s].out + d + m * N, acc[s][m]);
}

template <int N, int M, bool kDots, int kSums, class T, class I, class... Rest>
void gather_block_of(const Gather<T, I>& p, int64_t row, int64_t k0, int64_t k1, int64_t d, Rest... rest) {
  if (p.heads == 1) return gather_block<N, M, M, kDots, kSums>(p, row, k0, k1, d, rest...);
  const int64_t per_head = p.width / p.heads / N;  // vectors to a head, at least one
  const bool inside = d / (per_head * N) == (d + M * N - 1) / (per_head * N);
  if (inside) return gather_block<N, M, M, kDots, kSums>(p, row, k0, k1, d, rest...);
  if constexpr (M >= 4)
    if (per_head % 4 == 0 && d % (4 * N) == 0) return gather_block<N, M, 4, kDots, kSums>(p, row, k0, k1, d, rest...);
  if constexpr (M >= 2)
    if (per_head % 2 == 0 && d % (2 * N) == 0) return gather_block<N, M, 2, kDots, kSums>(p, row, k0, k1, d, rest...);
  gather_block<N, M, 1, kDots, kSums>(p, row, k0, k1, d, rest...);
}

// All features of the nonzeros k0 .. k1 of one row. Two sums at once take half as many vectors to a block, so
// that the accumulators stay in registers.
template <int N, bool kDots, int kSums, class T, class I>
void gather_row(const Gather<T, I>& p, int64_t row, int64_t k0, int64_t k1, T* dots, const Sum<T>* sums) {
  int64_t d = 0;
  if constexpr (kSums < 2)
    for (; d + 8 * N <= p.width; d += 8 * N) gather_block_of<N, 8, kDots, kSums>(p, row, k0, k1, d, dots, sums);
  for (; d + 4 * N <= p.width; d += 4 * N) gather_block_of<N, 4, kDots, kSums>(p, row, k0, k1, d, dots, sums);
  for (; d + 2 * N <= p.width; d += 2 * N) gather_block_of<N, 2, kDots, kSums>(p, row, k0, k1, d, dots, sums);
  for (; d < p.width; d += N) gather_block_of<N, 1, kDots, kSums>(p, row, k0, k1, d, dots, sums);
}

// What weights of edges are multiplied with (types.h).
template <class T>
class EdgeFactors {
 public:
  explicit EdgeFactors(const EdgeFactor& from)
      : scale_(static_cast<const T*>(from.scale)),
        drops_(from.seed != nullptr),
        seed_(drops_ ? *static_cast<const uint64_t*>(from.seed) : 0),
        threshold_(dropout_threshold(from.dropout)),
        kept_(static_cast<T>(1 / (1 - from.dropout))) {}

  bool any() const { return scale_ || drops_; }
  // weights[h] of edge `edge` for all heads.
  void multiply(T* weights, int64_t edge, int64_t heads) const {
    if (scale_)
      for (int64_t h = 0; h < heads; ++h) weights[h] *= scale_[edge * heads + h];
    if (drops_)
      for (int64_t h = 0; h < heads; ++h)
        weights[h] *= dropout_bits(seed_, edge * heads + h) < threshold_ ? T(0) : kept_;
  }

 private:
  const T* scale_;
  bool drops_;
  uint64_t seed_;
  uint32_t threshold_;
  T kept_;
};

template <class T>
void add_to(T* out, const T* part, int64_t width) {
  for (int64_t d = 0; d < width; ++d) out[d] += part[d];
}

// The same with the sums added up in pieces, and kMany pieces on their own before; `part` has room for two times kSums
// rows.
template <int N, bool kDots, int kSums, class T, class I>
void gather_long_row(const Gather<T, I>& p, int64_t row, int64_t k0, int64_t k1, T* dots, const Sum<T>* sums, T* part,
                     int64_t length = kShortPiece * kMany) {
  const auto some = [&](int64_t k, int64_t end, T* some_dots, const Sum<T>* into) {
    if (length == kShortPiece) return gather_row<N, kDots, kSums>(p, row, k, end, some_dots, into);
    gather_long_row<N, kDots, kSums>(p, row, k, end, some_dots, into, part + kSums * p.width, kShortPiece);
  };
  some(k0, std::min(k1, k0 + length), dots, sums);
  for (int64_t k = k0 + length; k < k1; k += length) {
    const int64_t at = (k - k0) * p.heads;
    Sum<T> parts[kSums];
    for (int s = 0; s < kSums; ++s) parts[s] = {sums[s].weights + at, part + s * p.width};
    some(k, std::min(k1, k + length), kDots ? dots + at : dots, parts);
    for (int s = 0; s < kSums; ++s) add_to(sums[s].out, parts[s].out, p.width);
  }
}

// body(row, k0, k1, scratch, part): scratch for `arrays` values per head and nonzero of the longest row, part for
// four rows of features.
template <class T, class I, class Body>
void for_rows(const CsrOf<I>& g, int64_t heads, int64_t width, int arrays, int threads, const Body& body) {
  for_row_ranges(g, threads, [&](int64_t first, int64_t last) {
    int64_t longest = 1;
    for (int64_t row = first; row < last; ++row)
      longest = std::max<int64_t>(longest, static_cast<int64_t>(g.indptr[row + 1] - g.indptr[row]));
    const Buffer<T> scratch(longest * heads * arrays), part(4 * width);
    for (int64_t row = first; row < last; ++row)
      body(row, static_cast<int64_t>(g.indptr[row]), static_cast<int64_t>(g.indptr[row + 1]), scratch.get(),
           part.get());
  });
}

}  // namespace
}  // namespace gnnaccel::GNNACCEL_ISA
