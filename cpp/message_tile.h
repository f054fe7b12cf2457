// The values of a program of messages for some tens of nonzeros, which stay in the first cache: an interpreter whose
// steps are loops over vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"
#include "message_plan.h"
#include "rows.h"
#include "simd.h"
#include "simd_math.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

// Nonzeros k .. k + n, their rows, and every value of the program for them.
template <class A, class I>
class Tile {
 public:
  explicit Tile(const Plan<A, I>& plan)
      : plan_(plan),
        program_(plan.program),
        graph_(plan.graph),
        values_(plan.room()),
        pointers_(program_.num_leaves * plan.most),
        views_(program_.num_leaves),
        row_of_(plan.most) {
    for (int64_t i = 0; i < program_.num_leaves; ++i) {
      const MessageLeaf& leaf = program_.leaves[i];
      A* const copies = register_(program_.num_registers + i);
      const bool in_place = Plan<A, I>::access(leaf) == Access::in_place;
      views_[i] = {in_place ? nullptr : copies, in_place ? pointers_.get() + i * plan_.most : nullptr};
      if (leaf.target != MessageTarget::c) continue;
      for (int64_t t = 0; t < plan_.most; ++t) {
        if (in_place)
          pointers_[i * plan_.most + t] = static_cast<const A*>(plan_.operands[i]);
        else
          with_type(leaf, plan_.operands[i],
                    [&](const auto* from) { copy_row(from, copies + t * leaf.width, leaf.width); });
      }
    }
  }

  // Computes the values of the nonzeros first .. first + count, of which the first is in row `row` or a later one.
  void compute(int64_t first, int64_t count, int64_t row) {
    k_ = first;
    n_ = count;
    for (int64_t t = 0; t < n_; ++t) {
      while (static_cast<int64_t>(graph_.indptr[row + 1]) <= k_ + t) ++row;
      row_of_[t] = row;
    }
    read_leaves();
    for (int64_t s = 0; s < program_.num_steps; ++s) step(program_.steps[s]);
  }

  // Computes the values of the rows row .. row + num_rows, and of their nonzeros first .. first + count: all of them
  // or, with `part`, those of one long row that there is room for.
  void compute(int64_t first, int64_t count, int64_t row, int64_t num_rows, const LongRow* part) {
    first_row_ = row;
    num_rows_ = num_rows;
    part_ = part;
    if (!part) return compute(first, count, row);
    k_ = first;
    n_ = count;
    std::fill_n(row_of_.get(), n_, row);
    read_leaves();
    for (int64_t s = 0; s < program_.num_steps; ++s)
      if (program_.steps[s].level <= part->level) step(program_.steps[s]);
  }

  View<A> view(int32_t value) const { return value < 0 ? views_[~value] : View<A>{register_(value), nullptr}; }
  int64_t row(int64_t t) const { return row_of_[t]; }

 private:
  static constexpr int N = kLanes<A>;
  using V = Vec<A, N>;

  A* register_(int64_t number) const { return align(values_.get()) + plan_.offsets[number]; }

  // f of the number of the row that a leaf has for each nonzero, or row.
  template <class F>
  void with_rows(MessageTarget target, const F& f) {
    switch (target) {
      case MessageTarget::u:
        return f([indices = graph_.indices + k_](int64_t t) -> int64_t { return indices[t]; });
      case MessageTarget::v:
        return f([rows = row_of_.get()](int64_t t) { return rows[t]; });
      case MessageTarget::row:
        return f([first = first_row_](int64_t t) { return first + t; });
      default:
        if (!graph_.edge_ids) return f([first = k_](int64_t t) { return first + t; });
        return f([edges = graph_.edge_ids + k_](int64_t t) -> int64_t { return edges[t]; });
    }
  }

  void read_leaves() {
    for (int64_t i = 0; i < program_.num_leaves; ++i) {
      const MessageLeaf& leaf = program_.leaves[i];
      if (leaf.target != MessageTarget::c) with_rows(leaf.target, [&](const auto& row) { read(i, leaf, row); });
    }
  }

  template <class F>
  void read(int64_t i, const MessageLeaf& leaf, const F& row) {
    const int64_t row_bytes = leaf.width * bytes_of(leaf.dtype, sizeof(I) == 8 ? IndexType::i64 : IndexType::i32);
    const char* const base = static_cast<const char*>(plan_.operands[i]);
    const int64_t count = leaf.target == MessageTarget::row ? num_rows_ : n_;
    if (leaf.target == MessageTarget::u || (leaf.target == MessageTarget::e && graph_.edge_ids)) {
      const int64_t ahead = std::min(n_, graph_.nnz - k_ - n_);
      for (int64_t t = n_; t < n_ + ahead; ++t)
        for (int64_t b = 0; b < std::min(row_bytes, kPrefetchBytes); b += 64)
          prefetch<1>(base + row(t) * row_bytes + b);
    }
    if (views_[i].rows) {
      const A** const pointers = pointers_.get() + i * plan_.most;
      for (int64_t t = 0; t < count; ++t) pointers[t] = reinterpret_cast<const A*>(base + row(t) * row_bytes);
      return;
    }
    A* const to = const_cast<A*>(views_[i].flat);
    with_type(leaf, base, [&](const auto* from) { copy_rows(from, row, count, leaf.width, to); });
  }

  template <class F>
  static void with_type(const MessageLeaf& leaf, const void* operand, const F& f) {
    switch (static_cast<DType>(leaf.dtype)) {
      case DType::f64:
        return f(static_cast<const double*>(operand));
      case DType::bf16:
        return f(static_cast<const bf16*>(operand));
      default:
        return f(static_cast<const float*>(operand));
    }
  }

  // Rows of few numbers by loops of a length that the compiler knows.
  template <class From, class F>
  static void copy_rows(const From* from, const F& row, int64_t count, int64_t width, A* to) {
    const auto rows = [&](auto known) {
      const int64_t w = known.value ? known.value : width;
      for (int64_t t = 0; t < count; ++t) copy_row(from + row(t) * w, to + t * w, w);
    };
    switch (width) {
      case 1:
        return rows(std::integral_constant<int64_t, 1>{});
      case 2:
        return rows(std::integral_constant<int64_t, 2>{});
      case 3:
        return rows(std::integral_constant<int64_t, 3>{});
      case 4:
        return rows(std::integral_constant<int64_t, 4>{});
      case 8:
        return rows(std::integral_constant<int64_t, 8>{});
      default:
        return rows(std::integral_constant<int64_t, 0>{});
    }
  }

  // f of every vector of one, two or three values. Registers have room for whole vectors; rows in place consist of
  // them.
  template <class F>
  void unary(const MessageStep& s, const F& f) {
    const View<A> a = view(s.a);
    A* const out = register_(s.out);
    if (!a.rows) {
      for (int64_t d = 0; d < count_ * s.width; d += N) store<N>(out + d, f(load<N>(a.flat + d)));
      return;
    }
    for (int64_t t = 0; t < count_; ++t)
      for (int64_t d = 0; d < s.width; d += N) store<N>(out + t * s.width + d, f(load<N>(a.rows[t] + d)));
  }

  template <class F>
  void binary(const MessageStep& s, const F& f) {
    const View<A> a = view(s.a), b = view(s.b);
    A* const out = register_(s.out);
    if (!a.rows && !b.rows) {
      for (int64_t d = 0; d < count_ * s.width; d += N) store<N>(out + d, f(load<N>(a.flat + d), load<N>(b.flat + d)));
      return;
    }
    for (int64_t t = 0; t < count_; ++t) {
      const A* const left = a.at(t, s.width);
      const A* const right = b.at(t, s.width);
      for (int64_t d = 0; d < s.width; d += N)
        store<N>(out + t * s.width + d, f(load<N>(left + d), load<N>(right + d)));
    }
  }

  void where(const MessageStep& s) {
    const View<A> a = view(s.a), b = view(s.b), c = view(s.c);
    A* const out = register_(s.out);
    const auto pick = [&](const A* mask, const A* yes, const A* no, A* to, int64_t count) {
      for (int64_t d = 0; d < count; d += N)
        store<N>(to + d, load<N>(mask + d) != V{} ? load<N>(yes + d) : load<N>(no + d));
    };
    if (!a.rows && !b.rows && !c.rows) return pick(a.flat, b.flat, c.flat, out, count_ * s.width);
    const auto row = [&](const View<A>& x, int64_t t) { return x.at(t, s.width); };
    for (int64_t t = 0; t < count_; ++t) pick(row(a, t), row(b, t), row(c, t), out + t * s.width, s.width);
  }

  // What vectors write behind a row's end the next row, or the room behind the last, takes.
  void expand(const MessageStep& s) {
    const View<A> a = view(s.a);
    A* const out = register_(s.out);
    const int64_t len = s.len, div = s.div;
    for (int64_t t = 0; t < count_; ++t) {
      const A* const from = a.at(t, len);
      A *to = out + t * s.width, *const end = to + s.width;
      if (div == 1)
        for (; to < end; to += len) copy_or_add<false>(from, to, len);
      else
        for (int64_t l = 0; to < end; l = l + 1 == len ? 0 : l + 1, to += div)
          for (int64_t d = 0; d < div; d += N) store<N>(to + d, splat<N>(from[l]));
    }
  }

  void fold(const MessageStep& s) {
    const View<A> a = view(s.a);
    A* const out = register_(s.out);
    const int64_t len = s.len, div = s.div;
    for (int64_t t = 0; t < count_; ++t) {
      const A *from = a.at(t, s.width), *const end = from + s.width;
      A* const to = out + t * len;
      if (from == end) std::fill_n(to, len, A(0));
      for (bool first = true; from < end; from += len * div, first = false) {
        if (div == 1)
          first ? copy_or_add<false>(from, to, len) : copy_or_add<true>(from, to, len);
        else
          for (int64_t l = 0; l < len; ++l) to[l] = (first ? A(0) : to[l]) + sum(from + l * div, div);
      }
    }
  }

  // As fold, of products.
  void dot(const MessageStep& s) {
    const View<A> a = view(s.a), b = view(s.b);
    A* const out = register_(s.out);
    const int64_t len = s.len, div = s.div;
    for (int64_t t = 0; t < count_; ++t) {
      const A* const left = a.at(t, s.width);
      const A* const right = b.at(t, s.width);
      A* const to = out + t * len;
      if (!s.width) std::fill_n(to, len, A(0));
      for (int64_t d = 0; d < s.width;)
        for (int64_t l = 0; l < len; ++l, d += div)
          to[l] = (d < len * div ? A(0) : to[l]) + sum_of_products(left + d, right + d, div);
    }
  }

  static A sum_of_products(const A* left, const A* right, int64_t n) {
    V total{};
    int64_t d = 0;
    for (; d + N <= n; d += N) total += load<N>(left + d) * load<N>(right + d);
    A all = d ? horizontal_sum<A, N>(total) : A(0);
    for (; d < n; ++d) all += left[d] * right[d];
    return all;
  }

  // What vectors write behind a run of `div` the next one, or the room behind the last, takes.
  void scale(const MessageStep& s) {
    const View<A> a = view(s.a), b = view(s.b);
    A* const out = register_(s.out);
    const int64_t len = s.len, div = s.div;
    for (int64_t t = 0; t < count_; ++t) {
      const A* const wide = a.at(t, s.width);
      const A* const by = b.at(t, len);
      A* const to = out + t * s.width;
      for (int64_t d = 0, l = 0; d < s.width; d += div, l = l + 1 == len ? 0 : l + 1) {
        const V factor = splat<N>(by[l]);
        for (int64_t i = 0; i < div; i += N) store<N>(to + d + i, load<N>(wide + d + i) * factor);
      }
    }
  }

  template <bool kAdd>
  static void copy_or_add(const A* from, A* to, int64_t count) {
    int64_t i = 0;
    for (; i + N <= count; i += N) store<N>(to + i, kAdd ? load<N>(to + i) + load<N>(from + i) : load<N>(from + i));
    for (; i < count; ++i) to[i] = kAdd ? to[i] + from[i] : from[i];
  }

  static A sum(const A* from, int64_t n) {
    V total{};
    int64_t d = 0;
    for (; d + N <= n; d += N) total += load<N>(from + d);
    A all = horizontal_sum<A, N>(total);
    for (; d < n; ++d) all += from[d];
    return all;
  }

  // Of each row, 0 of one without nonzeros; what vectors write behind a row's end the next one takes.
  template <class F>
  void over(const MessageStep& s, const F& join) {
    A* const out = register_(s.out);
    double* const state = part_ ? part_->states + s.len * plan_.stride : nullptr;
    if (part_ && s.level < part_->level) {
      for (int64_t d = 0; d < s.width; ++d) out[d] = static_cast<A>(state[d]);
      return;
    }
    const View<A> a = view(s.a);
    const auto at = [&](int64_t t) { return a.at(t, s.width); };
    for (int64_t r = 0, t = 0; r < num_rows_; ++r) {
      const int64_t stop = part_ ? n_ : static_cast<int64_t>(graph_.indptr[first_row_ + r + 1]) - k_, start = t;
      for (int64_t d = 0; d < s.width; d += N) {
        V all = start < stop ? load<N>(at(start) + d) : V{};
        for (t = start + 1; t < stop; ++t) all = join(all, load<N>(at(t) + d));
        store<N>(out + r * s.width + d, all);
      }
      t = stop;
    }
    if (!part_) return;
    for (int64_t d = 0; d < s.width; ++d)
      state[d] = part_->is_first ? static_cast<double>(out[d]) : join(state[d], static_cast<double>(out[d]));
  }

  void spread(const MessageStep& s) {
    const View<A> a = view(s.a);
    A* const out = register_(s.out);
    for (int64_t t = 0; t < n_; ++t) {
      const A* const from = a.rows ? a.rows[row_of_[t] - first_row_] : a.flat + (row_of_[t] - first_row_) * s.width;
      for (int64_t d = 0; d < s.width; d += N) store<N>(out + t * s.width + d, load<N>(from + d));
    }
  }

  void winner(const MessageStep& s) {
    const View<A> a = view(s.a);
    A* const out = register_(s.out);
    for (int64_t t = 0; t < n_; ++t) {
      const I* const ids = reinterpret_cast<const I*>(a.rows[t]);
      const I edge = static_cast<I>(graph_.edge(k_ + t));
      for (int64_t d = 0; d < s.width; ++d) out[t * s.width + d] = ids[d] == edge ? A(1) : A(0);
    }
  }

  void step(const MessageStep& s) {
    const V p = splat<N>(static_cast<A>(s.p)), one = splat<N>(A(1)), zero{};
    count_ = s.of_rows ? num_rows_ : n_;
    switch (s.op) {
      case MessageOp::add:
        return binary(s, [](V a, V b) { return a + b; });
      case MessageOp::sub:
        return binary(s, [](V a, V b) { return a - b; });
      case MessageOp::mul:
        return binary(s, [](V a, V b) { return a * b; });
      case MessageOp::div:
        return binary(s, [](V a, V b) { return a / b; });
      case MessageOp::max:  // NaN wins
        return binary(s, [](V a, V b) { return (a > b) | (a != a) ? a : b; });
      case MessageOp::min:
        return binary(s, [](V a, V b) { return (a < b) | (a != a) ? a : b; });
      case MessageOp::gt:
        return binary(s, [&](V a, V b) { return a > b ? one : zero; });
      case MessageOp::ge:
        return binary(s, [&](V a, V b) { return a >= b ? one : zero; });
      case MessageOp::eq:
        return binary(s, [&](V a, V b) { return a == b ? one : zero; });
      case MessageOp::keep:
        return binary(s, [&](V a, V b) { return a != zero ? b : zero; });
      case MessageOp::add_p:
        return unary(s, [&](V a) { return a + p; });
      case MessageOp::mul_p:
        return unary(s, [&](V a) { return a * p; });
      case MessageOp::div_p:
        return unary(s, [&](V a) { return a / p; });
      case MessageOp::max_p:
        return unary(s, [&](V a) { return (a > p) | (a != a) ? a : p; });
      case MessageOp::min_p:
        return unary(s, [&](V a) { return (a < p) | (a != a) ? a : p; });
      case MessageOp::gt_p:
        return unary(s, [&](V a) { return a > p ? one : zero; });
      case MessageOp::ge_p:
        return unary(s, [&](V a) { return a >= p ? one : zero; });
      case MessageOp::lt_p:
        return unary(s, [&](V a) { return a < p ? one : zero; });
      case MessageOp::le_p:
        return unary(s, [&](V a) { return a <= p ? one : zero; });
      case MessageOp::eq_p:
        return unary(s, [&](V a) { return a == p ? one : zero; });
      case MessageOp::rsub_p:
        return unary(s, [&](V a) { return p - a; });
      case MessageOp::rdiv_p:
        return unary(s, [&](V a) { return p / a; });
      case MessageOp::pow_p:
        return unary(s,
                     [&](V a) { return lane_by_lane<A, N>(a, [&](A x) { return std::pow(x, static_cast<A>(s.p)); }); });
      case MessageOp::leaky_relu_p:
        return unary(s, [&](V a) { return a > zero ? a : a * p; });
      case MessageOp::copy:
        return unary(s, [](V a) { return a; });
      case MessageOp::neg:
        return unary(s, [](V a) { return -a; });
      case MessageOp::abs:
        return unary(s, [](V a) { return lane_by_lane<A, N>(a, [](A x) { return std::abs(x); }); });
      case MessageOp::sign:
        return unary(s, [&](V a) { return (a > zero ? one : zero) - (a < zero ? one : zero); });
      case MessageOp::exp:
        return unary(s, [](V a) { return vector_exp<N>(a); });
      case MessageOp::expm1:
        return unary(s, [](V a) { return vector_expm1<N>(a); });
      case MessageOp::log:
        return unary(s, [](V a) { return vector_log<N>(a); });
      case MessageOp::log1p:
        return unary(s, [](V a) { return vector_log1p<N>(a); });
      case MessageOp::sqrt:
        return unary(s, [](V a) { return vector_sqrt<A, N>(a); });
      case MessageOp::rsqrt:
        return unary(s, [&](V a) { return one / vector_sqrt<A, N>(a); });
      case MessageOp::sigmoid:
        return unary(s, [](V a) { return vector_sigmoid<A, N>(a); });
      case MessageOp::tanh:
        return unary(s, [](V a) { return vector_tanh<N>(a); });
      case MessageOp::relu:
        return unary(s, [&](V a) { return a < zero ? zero : a; });
      case MessageOp::erf:
        return unary(s, [](V a) { return lane_by_lane<A, N>(a, [](A x) { return std::erf(x); }); });
      case MessageOp::sin:
        return unary(s, [](V a) { return lane_by_lane<A, N>(a, [](A x) { return std::sin(x); }); });
      case MessageOp::cos:
        return unary(s, [](V a) { return lane_by_lane<A, N>(a, [](A x) { return std::cos(x); }); });
      case MessageOp::round_bfloat16:
        if constexpr (sizeof(A) == 4) {
          return unary(s, [](V a) {  // as narrow() and widen(), of all lanes
            using U = Vec<uint32_t, N>;
            U bits;
            std::memcpy(&bits, &a, sizeof(bits));
            const U nan = U(a != a);
            bits = (((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u) & ~nan) | (nan & 0x7fc00000u);
            V rounded;
            std::memcpy(&rounded, &bits, sizeof(rounded));
            return rounded;
          });
        } else {
          return unary(s, [](V a) {
            return lane_by_lane<A, N>(a, [](A x) {
              bf16 narrowed;
              narrow(static_cast<float>(x), &narrowed);
              return static_cast<A>(widen(narrowed));
            });
          });
        }
      case MessageOp::round_float32:
        return unary(s, [](V a) {
          return lane_by_lane<A, N>(a, [](A x) {
            const volatile float narrowed = static_cast<float>(x);  // GCC 12 leaves both conversions of SSE2's out
            return static_cast<A>(narrowed);
          });
        });
      case MessageOp::where:
        return where(s);
      case MessageOp::fill: {
        A* const out = register_(s.out);
        return std::fill(out, out + count_ * s.width, static_cast<A>(s.p));
      }
      case MessageOp::expand:
        return expand(s);
      case MessageOp::fold:
        return fold(s);
      case MessageOp::dot:
        return dot(s);
      case MessageOp::scale:
        return scale(s);
      case MessageOp::winner:
        return winner(s);
      case MessageOp::over_sum:
        return over(s, [](auto a, auto b) { return a + b; });
      case MessageOp::over_max:  // NaN wins
        return over(s, [](auto a, auto b) { return (b > a) | (b != b) ? b : a; });
      case MessageOp::spread:
        return spread(s);
    }
  }

  const Plan<A, I>& plan_;
  const MessageProgram& program_;
  const CsrOf<I>& graph_;
  int64_t k_, n_;
  int64_t first_row_ = 0, num_rows_ = 0;  // where rows are taken whole
  int64_t count_ = 0;                     // of what the present step is of: nonzeros or rows
  const LongRow* part_ = nullptr;
  Buffer<A> values_;
  Buffer<const A*> pointers_;
  Buffer<View<A>> views_;
  Buffer<int64_t> row_of_;
};

}  // namespace
}  // namespace gnnaccel::GNNACCEL_ISA
