// Programs of elementwise messages on the CPU: computed tile by tile (message_tile.h), and reduced there. Nothing per
// edge is stored. Rows longer than kHubRow are worked on in pieces of that length, which run in parallel. Programs that
// reduce over a row, for its nonzeros to read, take whole rows into a tile; one that is longer they walk over again.
#include <algorithm>
#include <cstring>

#include "isa.h"
#include "message_tile.h"
#include "rows.h"
#include "simd.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

bool is_sum(const MessageOutput& output) {
  return output.reduce == MessageReduce::sum || output.reduce == MessageReduce::mean;
}

template <class A>
bool is_better(A x, A best, bool max) {  // NaN wins
  return (max ? x > best : x < best) || (x != x && best == best);
}

// The sum of a row's messages, in pieces, or a hub's would lose digits; or their extremum and whose it is.
template <class A, class I>
struct Accumulator {
  A* piece;
  A* many;
  A* all;
  I* argmax;
};

// Works through the nonzeros of whole rows, and writes these; or through a piece of one row's, and leaves in `part`,
// for each output, what there is of it: values [num_outputs, stride], argmax the same.
template <class A, class I>
struct Part {
  A* values;
  I* argmax;
};

template <class A, class I>
class Worker {
 public:
  Worker(const Plan<A, I>& plan, int64_t first, int64_t last)
      : Worker(plan, first, last, plan.graph.indptr[first], plan.graph.indptr[last], nullptr) {}
  Worker(const Plan<A, I>& plan, int64_t row, int64_t begin, int64_t end, const Part<A, I>& part)
      : Worker(plan, row, row + 1, begin, end, &part) {}

  void run() {
    if (plan_.whole_rows) return run_whole_rows();
    int64_t row = next_ = first_;
    for (k_ = begin_; k_ < end_; k_ += n_) {
      n_ = std::min(plan_.tile, end_ - k_);
      tile_.compute(k_, n_, row);
      row = tile_.row(n_ - 1);
      write();
    }
    if (!part_) return finish_before(last_);
    for (int64_t o = 0; o < program_.num_outputs; ++o) {
      const MessageOutput& output = program_.outputs[o];
      settle(o, end_ - begin_);
      std::copy_n(accumulators_[o].piece, output.width, part_->values + o * plan_.stride);
      if (!is_sum(output)) std::copy_n(accumulators_[o].argmax, output.width, part_->argmax + o * plan_.stride);
    }
  }

 private:
  static constexpr int N = kLanes<A>;
  using V = Vec<A, N>;

  void run_whole_rows() {
    int64_t row = next_ = first_;
    while (row < last_) {
      k_ = graph_.indptr[row];
      int64_t stop = row, most = plan_.most;
      for (; stop < last_ && stop - row < plan_.most && graph_.indptr[stop + 1] - k_ <= most; ++stop) most = plan_.tile;
      if (stop == row) {
        run_long_row(row++);
        continue;
      }
      n_ = graph_.indptr[stop] - k_;
      tile_.compute(k_, n_, row, stop - row, nullptr);
      write();
      write_rows(row, stop);
      row = stop;
    }
    finish_before(last_);
  }

  void run_long_row(int64_t row) {
    const int64_t begin = graph_.indptr[row], end = graph_.indptr[row + 1], levels = program_.num_levels;
    const Buffer<double> states(program_.num_overs * plan_.stride);
    bool walks_again = false;
    for (int64_t o = 0; o < program_.num_outputs; ++o) walks_again |= program_.outputs[o].reduce != MessageReduce::row;
    for (int64_t level = 0; level <= levels; ++level) {
      for (k_ = begin; k_ < end; k_ += n_) {
        n_ = std::min(plan_.tile, end - k_);
        const LongRow part{states.get(), level, k_ == begin};
        tile_.compute(k_, n_, row, 1, &part);
        if (level < levels) continue;
        if (!walks_again) break;
        write();
      }
    }
    write_rows(row, row + 1);
  }

  void write_rows(int64_t first, int64_t last) {
    for (int64_t o = 0; o < program_.num_outputs; ++o) {
      const MessageOutput& output = program_.outputs[o];
      if (output.reduce != MessageReduce::row) continue;
      const View<A> x = tile_.view(output.value);
      for (int64_t row = first, r = 0; row < last; ++row, ++r)
        write_row(x.at(r, output.width), output, plan_.results[2 * o], row);
    }
  }

  // Outputs that are not reduced over nonzeros.
  static bool is_made(const MessageOutput& output) {
    return output.reduce == MessageReduce::none || output.reduce == MessageReduce::row;
  }

  Worker(const Plan<A, I>& plan, int64_t first, int64_t last, int64_t begin, int64_t end, const Part<A, I>* part)
      : plan_(plan),
        program_(plan.program),
        graph_(plan.graph),
        first_(first),
        last_(last),
        begin_(begin),
        end_(end),
        part_(part),
        tile_(plan),
        sums_(program_.num_outputs * 3 * (plan.stride + N) + N),
        argmax_(program_.num_outputs * (plan.stride + N)),
        accumulators_(program_.num_outputs) {
    A* const sums = align(sums_.get());
    const int64_t room = plan_.stride + N;
    std::fill_n(sums, program_.num_outputs * 3 * room, A(0));
    std::fill_n(argmax_.get(), program_.num_outputs * room, I(-1));
    for (int64_t o = 0; o < program_.num_outputs; ++o)
      accumulators_[o] = {sums + 3 * o * room, sums + (3 * o + 1) * room, sums + (3 * o + 2) * room,
                          argmax_.get() + o * room};
  }

  void write() {
    for (int64_t o = 0; o < program_.num_outputs; ++o) {
      const MessageOutput& output = program_.outputs[o];
      if (output.reduce != MessageReduce::none) continue;
      const View<A> x = tile_.view(output.value);
      if (is_as_computed(output)) {
        A* const to = static_cast<A*>(plan_.results[2 * o]);
        if (!x.rows && !graph_.edge_ids) {
          std::copy_n(x.flat, n_ * output.width, to + k_ * output.width);
          continue;
        }
        for (int64_t t = 0; t < n_; ++t)
          write_row_of<false>(x, output.width, t, t + 1, 1, to + graph_.edge(k_ + t) * output.width);
        continue;
      }
      for (int64_t t = 0; t < n_; ++t)
        write_row(x.at(t, output.width), output, plan_.results[2 * o], graph_.edge(k_ + t));
    }
    for (int64_t t = 0, stop; t < n_; t = stop) {
      const int64_t row = tile_.row(t);
      const int64_t begin = part_ ? begin_ : graph_.indptr[row], end = part_ ? end_ : graph_.indptr[row + 1];
      if (!part_) finish_before(row);
      stop = std::min(n_, end - k_);
      if (!part_ && begin == k_ + t && end == k_ + stop && end - begin <= kShortPiece) {
        write_whole(row, t, stop);
        continue;
      }
      for (int64_t o = 0; o < program_.num_outputs; ++o) reduce(o, begin, t, stop);
      if (!part_ && end == k_ + stop) finish(row);
    }
  }

  // Rows of a result that are of the type that is computed in.
  static bool is_as_computed(const MessageOutput& output) {
    return output.dtype == static_cast<int32_t>(sizeof(A) == 8 ? DType::f64 : DType::f32);
  }

  // Writes a row whose messages are t0 .. t1 of this tile: sums without the way through the accumulators, which takes
  // longer than to add up a short row.
  void write_whole(int64_t row, int64_t t0, int64_t t1) {
    for (int64_t o = 0; o < program_.num_outputs; ++o) {
      const MessageOutput& output = program_.outputs[o];
      if (is_made(output)) continue;
      if (is_sum(output) && is_as_computed(output)) {
        A* const to = static_cast<A*>(plan_.results[2 * o]) + row * output.width;
        const int64_t count = output.reduce == MessageReduce::mean ? t1 - t0 : 1;
        write_row_of<true>(tile_.view(output.value), output.width, t0, t1, count, to);
        continue;
      }
      reduce(o, k_ + t0, t0, t1);
      finish(o, row, t1 - t0);
    }
    next_ = row + 1;
  }

  // Writes the values t0 .. t1: the sum of them, which is none of negative zeros, over `count`; or the only one.
  template <bool kSum>
  static void write_row_of(const View<A>& x, int64_t width, int64_t t0, int64_t t1, int64_t count, A* to) {
    const auto block = [&](auto vectors, int64_t d) {
      constexpr int M = decltype(vectors)::value;
      V acc[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) acc[m] = load<N>(x.at(t0, width) + d + m * N);
      if (kSum)
        for (int m = 0; m < M; ++m) acc[m] += V{};
      for (int64_t t = t0 + 1; t < t1; ++t) {
        const A* const from = x.at(t, width) + d;
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) acc[m] += load<N>(from + m * N);
      }
      if (count != 1)
        for (int m = 0; m < M; ++m) acc[m] /= splat<N>(static_cast<A>(count));
      if (d + M * N <= width) {
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) store<N>(to + d + m * N, acc[m]);
      } else {
        A last[N];
        store<N>(last, acc[0]);
        std::copy_n(last, width - d, to + d);
      }
    };
    if (!kSum && width < N) {  // of few numbers, without the way through a vector
      const A* const from = x.at(t0, width);
      for (int64_t d = 0; d < width; ++d) to[d] = from[d];
      return;
    }
    int64_t d = 0;
    for (; d + 4 * N <= width; d += 4 * N) block(std::integral_constant<int, 4>{}, d);
    for (; d < width; d += N) block(std::integral_constant<int, 1>{}, d);
  }

  // Adds the messages t .. stop, all of a row that begins at nonzero `begin`, to what there is of output o.
  void reduce(int64_t o, int64_t begin, int64_t t, int64_t stop) {
    const MessageOutput& output = program_.outputs[o];
    if (is_made(output)) return;
    const View<A> x = tile_.view(output.value);
    if (!is_sum(output)) return extremum(o, x, begin, t, stop);
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
        const A* const from = x.at(t, width) + d;
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

  void extremum(int64_t o, const View<A>& values, int64_t begin, int64_t t0, int64_t t1) {
    const MessageOutput& output = program_.outputs[o];
    const bool max = output.reduce == MessageReduce::max;
    A* const best = accumulators_[o].piece;
    I* const argmax = accumulators_[o].argmax;
    for (int64_t t = t0; t < t1; ++t) {
      const A* const from = values.at(t, output.width);
      const I edge = static_cast<I>(graph_.edge(k_ + t));
      const Vec<I, N> edges = splat<N>(edge);
      if (k_ + t == begin) {
        std::copy(from, from + output.width, best);
        std::fill(argmax, argmax + output.width, edge);
        continue;
      }
      for (int64_t d = 0; d < output.width; d += N) {  // into the room behind the last
        const V x = load<N>(from + d), old = load<N>(best + d);
        const auto better = (max ? x > old : x < old) | ((x != x) & (old == old));
        store<N>(best + d, better ? x : old);
        Vec<I, N> whose;
        std::memcpy(&whose, argmax + d, sizeof(whose));
        whose = __builtin_convertvector(better, Vec<I, N>) ? edges : whose;
        std::memcpy(argmax + d, &whose, sizeof(whose));
      }
    }
  }

  // Puts the pieces of a sum of `count` nonzeros together, into the first.
  void settle(int64_t o, int64_t count) {
    const MessageOutput& output = program_.outputs[o];
    const Accumulator<A, I>& acc = accumulators_[o];
    if (count <= kShortPiece || !is_sum(output)) return;
    add_up(acc.piece, acc.many, output.width);
    add_up(acc.many, acc.all, output.width);
    add_up(acc.all, acc.piece, output.width);
  }

  // Writes what there is of a row that is complete.
  void finish(int64_t row) {
    for (int64_t o = 0; o < program_.num_outputs; ++o)
      if (!is_made(program_.outputs[o])) finish(o, row, graph_.indptr[row + 1] - graph_.indptr[row]);
    next_ = row + 1;
  }

  void finish(int64_t o, int64_t row, int64_t degree) {
    const Accumulator<A, I>& acc = accumulators_[o];
    settle(o, degree);
    plan_.write(o, row, degree, acc.piece, acc.argmax);
    std::fill(acc.piece, acc.piece + program_.outputs[o].width, A(0));
  }

  void finish_before(int64_t row) {
    while (next_ < row) finish(next_);
  }

  const Plan<A, I>& plan_;
  const MessageProgram& program_;
  const CsrOf<I>& graph_;
  int64_t first_, last_;  // rows
  int64_t begin_, end_;   // their nonzeros
  const Part<A, I>* part_;
  int64_t next_;   // the first row that is not written yet
  int64_t k_, n_;  // the tile's nonzeros: k_ .. k_ + n_
  Tile<A, I> tile_;
  Buffer<A> sums_;
  Buffer<I> argmax_;
  Buffer<Accumulator<A, I>> accumulators_;
};

// Joins the parts of a row, in their order, so that nothing depends on the number of threads.
template <class A, class I>
void join(const Plan<A, I>& plan, int64_t row, int64_t degree, int64_t parts, const A* values, const I* argmax) {
  const int64_t step = plan.program.num_outputs * plan.stride;
  const Buffer<A> best(plan.stride);
  const Buffer<I> whose(plan.stride);
  for (int64_t o = 0; o < plan.program.num_outputs; ++o) {
    const MessageOutput& output = plan.program.outputs[o];
    if (output.reduce == MessageReduce::none) continue;
    for (int64_t d = 0; d < output.width; ++d) {
      const A* const of = values + o * plan.stride + d;
      if (is_sum(output)) {
        double sum = 0;
        for (int64_t j = 0; j < parts; ++j) sum += of[j * step];
        best[d] = static_cast<A>(sum);
        continue;
      }
      int64_t first = 0;
      for (int64_t j = 1; j < parts; ++j)
        if (is_better(of[j * step], of[first * step], output.reduce == MessageReduce::max)) first = j;
      best[d] = of[first * step];
      whose[d] = argmax[first * step + o * plan.stride + d];
    }
    plan.write(o, row, degree, best.get(), whose.get());
  }
}

template <class A, class I>
void run_hub(const Plan<A, I>& plan, int64_t row, int threads) {
  const int64_t begin = plan.graph.indptr[row], end = plan.graph.indptr[row + 1];
  const int64_t parts = (end - begin + kHubRow - 1) / kHubRow, step = plan.program.num_outputs * plan.stride;
  const Buffer<A> values(parts * step);
  const Buffer<I> argmax(parts * step);
  parallel_for(parts, threads, [&](int64_t j) {
    const int64_t k = begin + j * kHubRow;
    const Part<A, I> part{values.get() + j * step, argmax.get() + j * step};
    Worker<A, I>(plan, row, k, std::min(end, k + kHubRow), part).run();
  });
  join(plan, row, end - begin, parts, values.get(), argmax.get());
}

template <class A, class I>
void run(const MessageWalkArgs& a) {
  const Plan<A, I> plan(a);
  const auto& g = plan.graph;
  const int threads = useful_threads(g.nnz * a.program.width * (2 * a.program.num_steps + 1), a.threads);
  const auto is_hub = [&](int64_t row) { return !plan.whole_rows && g.indptr[row + 1] - g.indptr[row] > kHubRow; };
  for_row_ranges(g, threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; first < last; first = row + 1) {
      for (row = first; row < last && !is_hub(row);) ++row;
      if (first < row) Worker<A, I>(plan, first, row).run();
    }
  });
  if (g.nnz <= kHubRow || plan.whole_rows) return;
  for (int64_t row = 0; row < g.num_rows; ++row)
    if (is_hub(row)) run_hub(plan, row, threads);
}

}  // namespace

void message_walk(const MessageWalkArgs& a) {
  const bool wide = a.graph.index_type == IndexType::i64;
  if (a.program.compute == DType::f64) return wide ? run<double, int64_t>(a) : run<double, int32_t>(a);
  return wide ? run<float, int64_t>(a) : run<float, int32_t>(a);
}

}  // namespace gnnaccel::GNNACCEL_ISA
