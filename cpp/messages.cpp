// Programs of elementwise messages on the CPU: an interpreter that takes some tens of nonzeros at a time, so that every
// value of the program stays in the first cache, and reduces the messages there. Nothing per edge is stored.
#include <algorithm>
#include <cmath>

#include "isa.h"
#include "rows.h"
#include "simd.h"
#include "simd_math.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

// Bytes of values of the nonzeros that are worked on together: half a first-level cache.
constexpr int64_t kTileBytes = 24 << 10;
constexpr int64_t kMostInTile = 256;
constexpr int64_t kPrefetchBytes = 1024;  // of a gathered row; the processor follows a longer one by itself

// A value of the nonzeros of a tile: row t at rows[t], or at flat + t * width.
template <class A>
struct View {
  const A* flat;
  const A* const* rows;
};

template <class A>
A* align(A* from) {
  const auto address = (reinterpret_cast<uintptr_t>(from) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  return reinterpret_cast<A*>(address);
}

template <class To, class From>
void copy_row(const From* from, To* to, int64_t width) {
  for (int64_t d = 0; d < width; ++d) narrow(static_cast<Acc<To>>(widen(from[d])), to + d);
}

int64_t bytes_of(int32_t dtype, IndexType index_type) {
  if (dtype < 0) return index_type == IndexType::i64 ? 8 : 4;
  return dtype == static_cast<int32_t>(DType::f64) ? 8 : dtype == static_cast<int32_t>(DType::f32) ? 4 : 2;
}

// How rows of a leaf are read: where they lie, or from a copy in the tile.
enum class Access { in_place, copied, fixed };

// What all threads share: the program, and how its leaves are read.
template <class A, class I>
struct Plan {
  const MessageProgram& program;
  CsrOf<I> graph;
  const void* const* operands;
  void* const* results;
  int64_t tile;    // nonzeros
  int64_t stride;  // of a value's row in the room for a tile: the width of the widest

  explicit Plan(const MessageWalkArgs& a)
      : program(a.program), graph(a.graph), operands(a.operands), results(a.results), stride(a.program.width) {
    int64_t copies = 0;
    for (int64_t i = 0; i < program.num_leaves; ++i) copies += access(program.leaves[i]) != Access::in_place;
    const int64_t bytes = (program.num_registers + copies + 1) * stride * static_cast<int64_t>(sizeof(A));
    tile = std::min(kMostInTile, std::max<int64_t>(4, kTileBytes / bytes));
  }

  // Rows in place are read by whole vectors, and as they are.
  static Access access(const MessageLeaf& leaf) {
    if (leaf.dtype < 0) return Access::in_place;
    const bool as_is = leaf.dtype == static_cast<int32_t>(sizeof(A) == 8 ? DType::f64 : DType::f32);
    if (as_is && leaf.width % kLanes<A> == 0) return Access::in_place;
    return leaf.target == MessageTarget::c ? Access::fixed : Access::copied;
  }

  // Numbers of one value of a tile: whole vectors, and one more, so that values do not lie a power of two apart.
  int64_t room() const { return (tile * stride + 2 * kLanes<A> - 1) / kLanes<A> * kLanes<A>; }
};

// The sum of a row's messages, in pieces, or a hub's would lose digits; or their extremum and whose it is.
template <class A, class I>
struct Accumulator {
  A* piece;
  A* many;
  A* all;
  I* winners;
};

template <class A, class I>
class Worker {
 public:
  Worker(const Plan<A, I>& plan, int64_t first, int64_t last)
      : plan_(plan),
        program_(plan.program),
        graph_(plan.graph),
        first_(first),
        last_(last),
        values_((program_.num_registers + program_.num_leaves) * plan.room() + kLanes<A>),
        pointers_(program_.num_leaves * plan.tile),
        views_(program_.num_leaves),
        row_of_(plan.tile),
        sums_(program_.num_outputs * 3 * (plan.stride + kLanes<A>)+kLanes<A>),
        winners_(program_.num_outputs * plan.stride),
        accumulators_(program_.num_outputs) {
    A* const leaf_copies = align(values_.get()) + program_.num_registers * plan_.room();
    for (int64_t i = 0; i < program_.num_leaves; ++i) {
      const MessageLeaf& leaf = program_.leaves[i];
      A* const copies = leaf_copies + i * plan_.room();
      const bool in_place = Plan<A, I>::access(leaf) == Access::in_place;
      views_[i] = {in_place ? nullptr : copies, in_place ? pointers_.get() + i * plan_.tile : nullptr};
      if (leaf.target != MessageTarget::c) continue;
      for (int64_t t = 0; t < plan_.tile; ++t) {
        if (in_place)
          pointers_[i * plan_.tile + t] = static_cast<const A*>(plan_.operands[i]);
        else
          load_row(leaf, plan_.operands[i], 0, copies + t * leaf.width);
      }
    }
    A* sums = align(sums_.get());
    const int64_t room = plan_.stride + kLanes<A>;
    std::fill(sums, sums + program_.num_outputs * 3 * room, A(0));
    for (int64_t o = 0; o < program_.num_outputs; ++o)
      accumulators_[o] = {sums + 3 * o * room, sums + (3 * o + 1) * room, sums + (3 * o + 2) * room,
                          winners_.get() + o * plan_.stride};
  }

  void run() {
    const int64_t end = graph_.indptr[last_];
    next_ = first_;
    int64_t row = first_;
    for (int64_t k = graph_.indptr[first_]; k < end; k += plan_.tile) {
      k_ = k;
      n_ = std::min(plan_.tile, end - k);
      for (int64_t t = 0; t < n_; ++t) {
        while (static_cast<int64_t>(graph_.indptr[row + 1]) <= k + t) ++row;
        row_of_[t] = row;
      }
      read_leaves();
      for (int64_t s = 0; s < program_.num_steps; ++s) step(program_.steps[s]);
      write();
    }
    finish_before(last_);
  }

 private:
  static constexpr int N = kLanes<A>;
  using V = Vec<A, N>;

  A* register_(int32_t number) const { return align(values_.get()) + number * plan_.room(); }
  View<A> view(int32_t value) const { return value < 0 ? views_[~value] : View<A>{register_(value), nullptr}; }

  static void load_row(const MessageLeaf& leaf, const void* operand, int64_t row, A* to) {
    switch (static_cast<DType>(leaf.dtype)) {
      case DType::f64:
        return copy_row(static_cast<const double*>(operand) + row * leaf.width, to, leaf.width);
      case DType::bf16:
        return copy_row(static_cast<const bf16*>(operand) + row * leaf.width, to, leaf.width);
      default:
        return copy_row(static_cast<const float*>(operand) + row * leaf.width, to, leaf.width);
    }
  }

  int64_t row_read(MessageTarget target, int64_t t) const {
    switch (target) {
      case MessageTarget::u:
        return graph_.indices[k_ + t];
      case MessageTarget::v:
        return row_of_[t];
      default:
        return graph_.edge(k_ + t);
    }
  }

  void read_leaves() {
    for (int64_t i = 0; i < program_.num_leaves; ++i) {
      const MessageLeaf& leaf = program_.leaves[i];
      if (leaf.target == MessageTarget::c) continue;
      const int64_t row_bytes = leaf.width * bytes_of(leaf.dtype, sizeof(I) == 8 ? IndexType::i64 : IndexType::i32);
      const char* const base = static_cast<const char*>(plan_.operands[i]);
      if (leaf.target == MessageTarget::u || (leaf.target == MessageTarget::e && graph_.edge_ids)) {
        const int64_t ahead = std::min(n_, graph_.nnz - k_ - n_);
        for (int64_t t = n_; t < n_ + ahead; ++t) {
          const char* const row = base + row_read(leaf.target, t) * row_bytes;
          for (int64_t b = 0; b < std::min(row_bytes, kPrefetchBytes); b += 64) prefetch<1>(row + b);
        }
      }
      if (views_[i].rows) {
        for (int64_t t = 0; t < n_; ++t)
          pointers_[i * plan_.tile + t] = reinterpret_cast<const A*>(base + row_read(leaf.target, t) * row_bytes);
      } else {
        A* const copies = const_cast<A*>(views_[i].flat);
        for (int64_t t = 0; t < n_; ++t) load_row(leaf, base, row_read(leaf.target, t), copies + t * leaf.width);
      }
    }
  }

  // f of every vector of one, two or three values. Registers have room for whole vectors; rows in place consist of
  // them.
  template <class F>
  void unary(const MessageStep& s, const F& f) {
    const View<A> a = view(s.a);
    A* const out = register_(s.out);
    if (!a.rows) {
      for (int64_t d = 0; d < n_ * s.width; d += N) store<N>(out + d, f(load<N>(a.flat + d)));
      return;
    }
    for (int64_t t = 0; t < n_; ++t)
      for (int64_t d = 0; d < s.width; d += N) store<N>(out + t * s.width + d, f(load<N>(a.rows[t] + d)));
  }

  template <class F>
  void binary(const MessageStep& s, const F& f) {
    const View<A> a = view(s.a), b = view(s.b);
    A* const out = register_(s.out);
    if (!a.rows && !b.rows) {
      for (int64_t d = 0; d < n_ * s.width; d += N) store<N>(out + d, f(load<N>(a.flat + d), load<N>(b.flat + d)));
      return;
    }
    for (int64_t t = 0; t < n_; ++t) {
      const A* const left = a.rows ? a.rows[t] : a.flat + t * s.width;
      const A* const right = b.rows ? b.rows[t] : b.flat + t * s.width;
      for (int64_t d = 0; d < s.width; d += N)
        store<N>(out + t * s.width + d, f(load<N>(left + d), load<N>(right + d)));
    }
  }

  void where(const MessageStep& s) {
    const View<A> a = view(s.a), b = view(s.b), c = view(s.c);
    const auto row = [&](const View<A>& x, int64_t t) { return x.rows ? x.rows[t] : x.flat + t * s.width; };
    A* const out = register_(s.out);
    for (int64_t t = 0; t < n_; ++t) {
      const A *mask = row(a, t), *yes = row(b, t), *no = row(c, t);
      for (int64_t d = 0; d < s.width; ++d) out[t * s.width + d] = mask[d] != 0 ? yes[d] : no[d];
    }
  }

  void expand(const MessageStep& s) {
    const View<A> a = view(s.a);
    A* const out = register_(s.out);
    for (int64_t t = 0; t < n_; ++t) {
      const A* const from = a.rows ? a.rows[t] : a.flat + t * s.len;
      A* to = out + t * s.width;
      for (int64_t outer = 0; outer < s.width; outer += static_cast<int64_t>(s.len) * s.div)
        for (int64_t l = 0; l < s.len; ++l, to += s.div) std::fill(to, to + s.div, from[l]);
    }
  }

  void fold(const MessageStep& s) {
    const View<A> a = view(s.a);
    A* const out = register_(s.out);
    for (int64_t t = 0; t < n_; ++t) {
      const A* from = a.rows ? a.rows[t] : a.flat + t * s.width;
      A* const to = out + t * s.len;
      for (int64_t l = 0; l < s.len; ++l) to[l] = 0;
      for (int64_t outer = 0; outer < s.width; outer += static_cast<int64_t>(s.len) * s.div, from += s.len * s.div)
        for (int64_t l = 0; l < s.len; ++l) to[l] += s.div == 1 ? from[l] : sum(from + l * s.div, s.div);
    }
  }

  static A sum(const A* from, int64_t n) {
    V total{};
    int64_t d = 0;
    for (; d + N <= n; d += N) total += load<N>(from + d);
    A all = horizontal_sum<A, N>(total);
    for (; d < n; ++d) all += from[d];
    return all;
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
      case MessageOp::where:
        return where(s);
      case MessageOp::fill: {
        A* const out = register_(s.out);
        return std::fill(out, out + n_ * s.width, static_cast<A>(s.p));
      }
      case MessageOp::expand:
        return expand(s);
      case MessageOp::fold:
        return fold(s);
      case MessageOp::winner:
        return winner(s);
    }
  }

  static void write_row(const A* from, const MessageOutput& output, void* results, int64_t row) {
    const int64_t at = row * output.width;
    switch (static_cast<DType>(output.dtype)) {
      case DType::f64:
        return copy_row(from, static_cast<double*>(results) + at, output.width);
      case DType::bf16:
        return copy_row(from, static_cast<bf16*>(results) + at, output.width);
      default:
        return copy_row(from, static_cast<float*>(results) + at, output.width);
    }
  }

  void write() {
    for (int64_t o = 0; o < program_.num_outputs; ++o) {
      const MessageOutput& output = program_.outputs[o];
      if (output.reduce != MessageReduce::none) continue;
      const View<A> x = view(output.value);
      for (int64_t t = 0; t < n_; ++t)
        write_row(x.rows ? x.rows[t] : x.flat + t * output.width, output, plan_.results[2 * o], graph_.edge(k_ + t));
    }
    for (int64_t t = 0, stop; t < n_; t = stop) {
      const int64_t row = row_of_[t], end = graph_.indptr[row + 1];
      finish_before(row);
      stop = std::min(n_, end - k_);
      for (int64_t o = 0; o < program_.num_outputs; ++o) reduce(o, row, t, stop);
      if (end == k_ + stop) finish(row);
    }
  }

  // Adds the messages t .. stop, all of one row, to what there is of output o.
  void reduce(int64_t o, int64_t row, int64_t t, int64_t stop) {
    const MessageOutput& output = program_.outputs[o];
    const bool sums = output.reduce == MessageReduce::sum || output.reduce == MessageReduce::mean;
    if (output.reduce == MessageReduce::none) return;
    const View<A> x = view(output.value);
    const int64_t begin = graph_.indptr[row];
    if (!sums) return extremum(o, x, begin, t, stop);
    const Accumulator<A, I>& acc = accumulators_[o];
    while (t < stop) {
      const int64_t done = k_ + t - begin;
      if (done && done % kShortPiece == 0) {
        add_up(acc.piece, acc.many, output.width);
        if (done % (kShortPiece * kMany) == 0) add_up(acc.many, acc.all, output.width);
      }
      const int64_t until = std::min(stop, t + kShortPiece - done % kShortPiece);
      add(x, output.width, t, until, acc.piece);
      t = until;
    }
  }

  static void add_up(A* part, A* total, int64_t width) {
    for (int64_t d = 0; d < width; ++d) total[d] += part[d], part[d] = 0;
  }

  static void add(const View<A>& x, int64_t width, int64_t t0, int64_t t1, A* sum) {
    const auto block = [&](auto vectors, int64_t d) {
      constexpr int M = decltype(vectors)::value;
      V acc[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) acc[m] = load<N>(sum + d + m * N);
      for (int64_t t = t0; t < t1; ++t) {
        const A* const from = (x.rows ? x.rows[t] : x.flat + t * width) + d;
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) acc[m] += load<N>(from + m * N);
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) store<N>(sum + d + m * N, acc[m]);
    };
    int64_t d = 0;
    for (; d + 4 * N <= width; d += 4 * N) block(std::integral_constant<int, 4>{}, d);
    for (; d < width; d += N) block(std::integral_constant<int, 1>{}, d);
  }

  void extremum(int64_t o, const View<A>& x, int64_t begin, int64_t t0, int64_t t1) {
    const MessageOutput& output = program_.outputs[o];
    const bool max = output.reduce == MessageReduce::max;
    A* const best = accumulators_[o].piece;
    I* const winners = accumulators_[o].winners;
    for (int64_t t = t0; t < t1; ++t) {
      const A* const from = x.rows ? x.rows[t] : x.flat + t * output.width;
      const I edge = static_cast<I>(graph_.edge(k_ + t));
      if (k_ + t == begin) {
        std::copy(from, from + output.width, best);
        std::fill(winners, winners + output.width, edge);
        continue;
      }
      for (int64_t d = 0; d < output.width; ++d) {
        const bool better = (max ? from[d] > best[d] : from[d] < best[d]) || (from[d] != from[d] && best[d] == best[d]);
        best[d] = better ? from[d] : best[d];
        winners[d] = better ? edge : winners[d];
      }
    }
  }

  // Writes what there is of a row that is complete.
  void finish(int64_t row) {
    const int64_t degree = graph_.indptr[row + 1] - graph_.indptr[row];
    for (int64_t o = 0; o < program_.num_outputs; ++o) {
      const MessageOutput& output = program_.outputs[o];
      const Accumulator<A, I>& acc = accumulators_[o];
      if (output.reduce == MessageReduce::none) continue;
      if (degree > kShortPiece && (output.reduce == MessageReduce::sum || output.reduce == MessageReduce::mean)) {
        add_up(acc.piece, acc.many, output.width);
        add_up(acc.many, acc.all, output.width);
        std::copy(acc.all, acc.all + output.width, acc.piece);
        std::fill(acc.all, acc.all + output.width, A(0));
      }
      if (output.reduce == MessageReduce::mean && degree)
        for (int64_t d = 0; d < output.width; ++d) acc.piece[d] /= static_cast<A>(degree);
      write_row(acc.piece, output, plan_.results[2 * o], row);
      if (I* const winners = static_cast<I*>(plan_.results[2 * o + 1])) {
        if (degree)
          std::copy(acc.winners, acc.winners + output.width, winners + row * output.width);
        else
          std::fill(winners + row * output.width, winners + (row + 1) * output.width, I(-1));
      }
      std::fill(acc.piece, acc.piece + output.width, A(0));
    }
    next_ = row + 1;
  }

  void finish_before(int64_t row) {
    while (next_ < row) finish(next_);
  }

  const Plan<A, I>& plan_;
  const MessageProgram& program_;
  const CsrOf<I>& graph_;
  int64_t first_, last_;
  int64_t next_;   // the first row that is not written yet
  int64_t k_, n_;  // the tile: nonzeros k_ .. k_ + n_
  Buffer<A> values_;
  Buffer<const A*> pointers_;
  Buffer<View<A>> views_;
  Buffer<int64_t> row_of_;
  Buffer<A> sums_;
  Buffer<I> winners_;
  Buffer<Accumulator<A, I>> accumulators_;
};

template <class A, class I>
void run(const MessageWalkArgs& a) {
  const Plan<A, I> plan(a);
  const int64_t work = a.graph.nnz * a.program.width * (2 * a.program.num_steps + 1);
  for_row_ranges(plan.graph, useful_threads(work, a.threads),
                 [&](int64_t first, int64_t last) { Worker<A, I>(plan, first, last).run(); });
}

}  // namespace

void message_walk(const MessageWalkArgs& a) {
  const bool wide = a.graph.index_type == IndexType::i64;
  if (a.program.compute == DType::f64) return wide ? run<double, int64_t>(a) : run<double, int32_t>(a);
  return wide ? run<float, int64_t>(a) : run<float, int32_t>(a);
}

}  // namespace gnnaccel::GNNACCEL_ISA
