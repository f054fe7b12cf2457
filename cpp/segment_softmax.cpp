// Sums of segments weighted by a softmax of each feature over its segment, on the CPU: a block of features of a segment
// stays in cache, where the maximum, the exponentials and both sums are taken; nothing is written for a row.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "isa.h"
#include "rows.h"
#include "simd.h"
#include "simd_exp.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

// The features d .. d + N of a segment.
template <int N, class T>
struct Block {
  using A = Acc<T>;
  using V = Vec<A, N>;
  const SegmentSoftmaxArgs& a;
  int64_t segment, begin, end, d;
  V t;

  Block(const SegmentSoftmaxArgs& args, int64_t segment, int64_t begin, int64_t end, int64_t d)
      : a(args), segment(segment), begin(begin), end(end), d(d), t(splat<N>(static_cast<A>(args.scale))) {
    const auto* given = static_cast<const A*>(a.t);
    if (given) t = a.num_t == 1 ? splat<N>(*given) : load<N>(given + d);
  }

  V row(const void* x, int64_t i) const { return load<N>(static_cast<const T*>(x) + i * a.width + d); }
  A* of_segment(void* stats, int64_t which) const {
    return static_cast<A*>(stats) + (which * a.segments.num_rows + segment) * a.width + d;
  }

  void forward() const {
    V top = splat<N>(-std::numeric_limits<A>::infinity());
    for (int64_t i = begin; i < end; ++i) top = larger<N, A>(t * row(a.x, i), top);
    PieceSum<V> sums, weighted;
    for (int64_t i0 = begin; i0 < end; i0 += kSumPiece) {
      V sum{}, with{};
      for (int64_t i = i0; i < std::min(end, i0 + kSumPiece); ++i) {
        const V x = row(a.x, i), weight = exp_of<N>(t * x - top);
        sum += weight;
        with += weight * x;
      }
      sums.add(sum);
      weighted.add(with);
    }
    const bool empty = begin == end;
    const V inverse = empty ? V{} : splat<N>(A(1)) / sums.total();
    const V out = weighted.total() * inverse;
    store<N>(static_cast<T*>(a.out) + segment * a.width + d, out);
    store<N>(of_segment(a.stats, 0), empty ? V{} : top);
    store<N>(of_segment(a.stats, 1), inverse);
    store<N>(of_segment(a.stats, 2), out);
  }

  void backward() const {
    const V grad = row(a.grad_out, segment), top = load<N>(of_segment(a.stats, 0));
    const V inverse = load<N>(of_segment(a.stats, 1)), out = load<N>(of_segment(a.stats, 2));
    PieceSum<V> of_t;
    for (int64_t i0 = begin; i0 < end; i0 += kSumPiece) {
      V sum{};
      for (int64_t i = i0; i < std::min(end, i0 + kSumPiece); ++i) {
        const V x = row(a.x, i), part = grad * (exp_of<N>(t * x - top) * inverse), apart = x - out;
        sum += part * apart * apart;  // as the sum of part * apart is 0
        store<N>(static_cast<T*>(a.grad_x) + i * a.width + d, a.constant ? part : part + part * t * apart);
      }
      of_t.add(sum);
    }
    if (a.grad_t) store<N>(of_segment(a.grad_t, 0), of_t.total());
  }

  void run() const { return a.grad_out ? backward() : forward(); }
};

template <class T, class I>
void run(const SegmentSoftmaxArgs& a) {
  const CsrOf<I> segments(a.segments);
  constexpr int N = kLanes<T>;
  const int threads = useful_threads(8 * segments.nnz * a.width, a.threads);
  for_row_ranges(segments, threads, [&](int64_t first, int64_t last) {
    for (int64_t segment = first; segment < last; ++segment) {
      const int64_t begin = segments.indptr[segment], end = segments.indptr[segment + 1];
      int64_t d = 0;
      for (; d + N <= a.width; d += N) Block<N, T>(a, segment, begin, end, d).run();
      for (; d + 4 <= a.width; d += 4) Block<4, T>(a, segment, begin, end, d).run();
      for (; d < a.width; ++d) Block<1, T>(a, segment, begin, end, d).run();
    }
  });
}

}  // namespace

void segment_softmax(const SegmentSoftmaxArgs& a) {
  const bool wide = a.segments.index_type == IndexType::i64;
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
