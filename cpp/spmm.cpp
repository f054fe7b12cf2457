// SpMM on the CPU: rows walked in ranges of equal cost, one row's accumulators in vector registers, the
// source row of the edge eight ahead prefetched. No message is ever stored. Rows longer than kPiece are
// cut into pieces of that length whose partial results are combined in order: an f32 accumulator that takes
// no more terms than that stays accurate. The pieces of a row longer than kHubRow run in parallel, so that
// one hub neither holds a thread nor makes the result depend on the number of threads.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "spmm_broadcast.h"
#include "spmm_problem.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

enum class Rhs { none, scalar, group, full, source };  // source: Fused's scale of it, and a scalar if there is one

// ---- The vector path: full-width rows gathered by column or by edge, with an optional edge weight. ----

// A combination of message and layout that is worth its own loop.
template <bool kByEdge_, Message kMessage_, Rhs kRhs_, bool kExtreme_>
struct Kind {
  static constexpr bool kByEdge = kByEdge_;
  static constexpr Message kMessage = kMessage_;
  static constexpr Rhs kRhs = kRhs_;
  static constexpr bool kExtreme = kExtreme_;
};

template <class K, int N, class T, class I>
inline Vec<Acc<T>, N> edge_operand(const Problem<T, I>& p, int64_t e, int64_t d, int64_t head) {
  if constexpr (K::kRhs == Rhs::scalar)
    return splat<N>(widen(p.rhs_data()[e]));
  else if constexpr (K::kRhs == Rhs::group)
    return splat<N>(widen(p.rhs_data()[e * p.rhs.len + head]));
  else
    return load<N>(p.rhs_data() + e * p.num_feats + d);
}

template <class K, int kBytes, class T, class I>
[[gnu::always_inline]] inline void prefetch_ahead(const Problem<T, I>& p, int64_t k, int64_t d) {
  if (k + kPrefetchAhead >= p.graph.nnz) return;
  const int64_t next = k + kPrefetchAhead;
  if constexpr (!K::kByEdge)
    prefetch<kBytes>(p.lhs_data() + static_cast<int64_t>(p.graph.indices[next]) * p.num_feats + d);
  if (!p.graph.edge_ids) return;  // edge operands are then read in order
  if constexpr (K::kRhs == Rhs::scalar || K::kRhs == Rhs::group)
    prefetch<1>(p.rhs_data() + static_cast<int64_t>(p.graph.edge_ids[next]) * p.rhs.len);
  else if constexpr (K::kByEdge || K::kRhs == Rhs::full)
    prefetch<kBytes>(p.rhs_data() + static_cast<int64_t>(p.graph.edge_ids[next]) * p.num_feats + d);
}

// Where the m-th of some vectors of N begins: side by side, but none after `last`.
inline int64_t place_of(int m, int N, int64_t last) { return std::min<int64_t>(m * N, last); }

// The element of `operand` for the vectors of N from feature d on, none of which straddles heads. One division per
// block: two for each vector cost what several edges do.
template <int N, int M>
void heads_of(const Operand& operand, int64_t d, int64_t last, int64_t (&head)[M]) {
  int64_t h = d ? (d / operand.div) % operand.len : 0, rest = d ? d % operand.div : 0;
  for (int m = 0; m < M; ++m) {
    head[m] = h;
    rest += place_of(m + 1, N, last) - place_of(m, N, last);
    if (rest < operand.div) continue;
    rest = 0;
    h = h + 1 == operand.len ? 0 : h + 1;
  }
}

// Features d .. d + last + N of nonzeros k0 .. k1 (at least one) of row `row`, in M vectors; more than half of M are
// needed. Where they are more than the features, the last ones overlap, or are the same.
template <class K, int N, int M, class T, class I>
void block(const Problem<T, I>& p, int64_t row, int64_t k0, int64_t k1, int64_t d, int64_t last,
           const Partial<Acc<T>>* partial) {
  using A = Acc<T>;
  using V = Vec<A, N>;
  using Index = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
  using W = Vec<Index, N>;
  V acc[M];
  W winner[M];  // the first nonzero, unless another beats infinity
  int64_t head[M], place[M];
  const A infinity = std::numeric_limits<A>::infinity();
  const A start = !K::kExtreme ? A(0) : p.reduce == Reduce::max ? -infinity : infinity;
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    acc[m] = splat<N>(start);
    winner[m] = W{};
    place[m] = m <= M / 2 - 1 ? m * N : place_of(m, N, last);
  }
  if constexpr (K::kRhs == Rhs::group) heads_of<N>(p.rhs, d, last, head);
  for (int64_t k = k0; k < k1; ++k) {
    prefetch_ahead<K, N * M* static_cast<int>(sizeof(T))>(p, k, d);
    const bool needs_edge = K::kByEdge || (K::kRhs != Rhs::none && K::kRhs != Rhs::source);
    [[maybe_unused]] A scale = 1;
    if constexpr (K::kRhs == Rhs::source) scale = source_scale(p, k);
    const int64_t e = needs_edge ? p.graph.edge(k) : 0;
    const T* x = K::kByEdge ? p.rhs_data() + e * p.num_feats + d
                            : p.lhs_data() + static_cast<int64_t>(p.graph.indices[k]) * p.num_feats + d;
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      V value = load<N>(x + place[m]);
      if constexpr (K::kRhs != Rhs::none) {
        V w;
        if constexpr (K::kRhs == Rhs::source) {
          w = splat<N>(scale);
        } else {
          w = edge_operand<K, N>(p, e, d + place[m], K::kRhs == Rhs::group ? head[m] : 0);
        }
        value = K::kMessage == Message::mul ? value * w : value + w;
      }
      if constexpr (!K::kExtreme) {
        acc[m] += value;
      } else {
        keep_better(acc[m], winner[m], value, W{} + static_cast<Index>(k - k0), p.reduce == Reduce::max);
      }
    }
  }
  const int64_t at = row * p.num_feats + d;
  if constexpr (K::kExtreme) {
    Index won[N];
    for (int m = 0; m < M; ++m) {
      std::memcpy(won, &winner[m], sizeof(won));
      if (partial)
        for (int i = 0; i < N; ++i) partial->winner[d + place[m] + i] = k0 + won[i];
      else
        write_winners(p, at + place[m], k0, won, N);
    }
  }
  if (partial) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) store<N>(partial->value + d + place[m], acc[m]);
    return;
  }
  const A scale = p.reduce == Reduce::mean ? A(1) / static_cast<A>(k1 - k0) : A(1);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const V value = K::kExtreme ? acc[m] : epilogue<N, T>(p.fused, acc[m] * scale, row, d + place[m], p.num_feats);
    store<N>(p.out + at + place[m], value);
  }
}

// The same for heads, or rows without any, of C features that no vector of four fits: M of them from d on, each value
// by itself.
template <class K, int C, int M, class T, class I>
void narrow_block(const Problem<T, I>& p, int64_t row, int64_t k0, int64_t k1, int64_t d,
                  const Partial<Acc<T>>* partial) {
  using A = Acc<T>;
  const A infinity = std::numeric_limits<A>::infinity();
  const bool max = p.reduce == Reduce::max;
  const int64_t head = K::kRhs == Rhs::group && d ? (d / C) % p.rhs.len : 0;
  A acc[M * C];
  int64_t winner[K::kExtreme ? M * C : 1];
  for (int i = 0; i < M * C; ++i) {
    acc[i] = !K::kExtreme ? A(0) : max ? -infinity : infinity;
    if (K::kExtreme) winner[i] = k0;
  }
  for (int64_t k = k0; k < k1; ++k) {
    prefetch_ahead<K, C * M* static_cast<int>(sizeof(T))>(p, k, d);
    const bool needs_edge = K::kByEdge || (K::kRhs != Rhs::none && K::kRhs != Rhs::source);
    const int64_t e = needs_edge ? p.graph.edge(k) : 0;
    const T* x = K::kByEdge ? p.rhs_data() + e * p.num_feats + d
                            : p.lhs_data() + static_cast<int64_t>(p.graph.indices[k]) * p.num_feats + d;
    [[maybe_unused]] A weight = 1;
    if constexpr (K::kRhs == Rhs::source) weight = source_scale(p, k);
    if constexpr (K::kRhs == Rhs::scalar) weight = widen(p.rhs_data()[e]);
#pragma GCC unroll 24
    for (int i = 0; i < M * C; ++i) {
      A value = widen(x[i]);
      if constexpr (K::kRhs == Rhs::full) weight = widen(p.rhs_data()[e * p.num_feats + d + i]);
      if constexpr (K::kRhs == Rhs::group) weight = widen(p.rhs_data()[e * p.rhs.len + head + i / C]);
      if constexpr (K::kRhs != Rhs::none) value = K::kMessage == Message::mul ? value * weight : value + weight;
      if constexpr (!K::kExtreme) {
        acc[i] += value;
      } else if (beats(value, acc[i], max)) {
        acc[i] = value;
        winner[i] = k;
      }
    }
  }
  for (int i = 0; i < M * C; ++i) {
    if (partial)
      partial->value[d + i] = acc[i];
    else
      write(p, row, d + i, p.reduce == Reduce::mean ? acc[i] / static_cast<A>(k1 - k0) : acc[i]);
    if (K::kExtreme && partial) partial->winner[d + i] = winner[i];
  }
  if (K::kExtreme && !partial) write_winners(p, row * p.num_feats + d, 0, winner, M * C);
}

// Calls f with the largest of 8, 4, 2 and 1 that is at most `wanted`, as an integral constant.
template <class F>
inline void with_vectors(int64_t wanted, F f) {
  if (wanted >= 8) return f(std::integral_constant<int, 8>{});
  if (wanted >= 4) return f(std::integral_constant<int, 4>{});
  if (wanted >= 2) return f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, 1>{});
}

// Features first .. end, at least N, of one row (or piece), in blocks of 8, 4, 2 or 1 vectors. Recomputing some
// features costs less than a partial vector or a second walk. Vectors shorter than the machine's are for rows that two
// of them cover, unless heads bound them.
template <class K, int N, class T, class I>
void features(const Problem<T, I>& p, int64_t row, int64_t k0, int64_t k1, int64_t first, int64_t end,
              const Partial<Acc<T>>* partial) {
  constexpr bool kShort = N < kLanes<T> && K::kRhs != Rhs::group;
  for (int64_t d = first; d < end;) {
    const int64_t vectors = (end - d + N - 1) / N;
    const auto one = [&](auto size) {
      const int64_t start = std::max(first, std::min(d, end - size * N));
      block<K, N, size>(p, row, k0, k1, start, std::min<int64_t>((size - 1) * N, end - start - N), partial);
      d = start + size * N;
    };
    if (vectors == 1) {
      one(std::integral_constant<int, 1>{});
    } else if (kShort || vectors == 2) {
      one(std::integral_constant<int, 2>{});
    } else if constexpr (!kShort) {
      if (vectors <= 5)
        one(std::integral_constant<int, 4>{});
      else
        one(std::integral_constant<int, 8>{});
    }
  }
}

// All features of one row (or piece) by narrow_block. Weights of heads may repeat: a block does not go past the last.
template <class K, int C, class T, class I>
void narrow_row(const Problem<T, I>& p, int64_t row, int64_t k0, int64_t k1, const Partial<Acc<T>>* partial) {
  if constexpr (K::kRhs != Rhs::group) {
    narrow_block<K, C, 1>(p, row, k0, k1, 0, partial);
  } else {
    for (int64_t h = 0; h < p.num_feats / C;)
      with_vectors(p.rhs.len - h % p.rhs.len, [&](auto heads) {
        narrow_block<K, C, heads>(p, row, k0, k1, h * C, partial);
        h += heads;
      });
  }
}

// ---- Walking the rows. ----

template <class T, class I>
void empty_row(const Problem<T, I>& p, int64_t row) {
  constexpr int N = kLanes<T>;
  const int64_t at = row * p.num_feats;
  const auto value = static_cast<Acc<T>>(p.empty_value);
  int64_t d = 0;
  for (; d + N <= p.num_feats; d += N)
    store<N>(p.out + at + d, epilogue<N, T>(p.fused, splat<N>(value), row, d, p.num_feats));
  for (; d < p.num_feats; ++d) write(p, row, d, value);
  if (p.arg_lhs) std::fill_n(p.arg_lhs + at, p.num_feats, I(-1));
  if (p.arg_rhs) std::fill_n(p.arg_rhs + at, p.num_feats, I(-1));
}

template <class T, class I>
void combine_pieces(const Problem<T, I>& p, int64_t row, int64_t degree, const Partial<Acc<T>>& pieces, int64_t count) {
  const bool extreme = p.reduce == Reduce::max || p.reduce == Reduce::min;
  for (int64_t d = 0; d < p.num_feats; ++d) {
    Acc<T> acc = pieces.value[d];
    int64_t winner = extreme ? pieces.winner[d] : 0;
    double sum = acc;  // of a hub there are as many pieces as nonzeros of others
    for (int64_t i = 1; i < count; ++i) {
      const Acc<T> next = pieces.value[i * p.num_feats + d];
      if (!extreme) {
        sum += next;
      } else if (beats(next, acc, p.reduce == Reduce::max)) {
        acc = next;
        winner = pieces.winner[i * p.num_feats + d];
      }
    }
    if (!extreme) acc = static_cast<Acc<T>>(p.reduce == Reduce::mean ? sum / static_cast<double>(degree) : sum);
    write(p, row, d, acc);
    if (extreme) write_winners(p, row * p.num_feats + d, 0, &winner, 1);
  }
}

template <class T, class I, class Row>
void row_in_pieces(const Problem<T, I>& p, int64_t i, int threads, const Row& one_row) {
  const int64_t begin = p.graph.indptr[i], end = p.graph.indptr[i + 1], row = p.row_at(i);
  const int64_t count = (end - begin + kPiece - 1) / kPiece;
  const bool extreme = p.reduce == Reduce::max || p.reduce == Reduce::min;
  const Buffer<Acc<T>> values(count * p.num_feats);
  const Buffer<int64_t> argmax(extreme ? count * p.num_feats : 0);
  const auto piece_at = [&](int64_t i) {
    return Partial<Acc<T>>{values.get() + i * p.num_feats, extreme ? argmax.get() + i * p.num_feats : nullptr};
  };
  parallel_for(count, threads, [&](int64_t j) {
    const Partial<Acc<T>> piece = piece_at(j);
    one_row(row, begin + j * kPiece, std::min(end, begin + (j + 1) * kPiece), &piece);
  });
  combine_pieces(p, row, end - begin, piece_at(0), count);
}

template <class T, class I, class Row>
void walk(const Problem<T, I>& p, int threads, const Row& one_row) {
  const auto& g = p.graph;
  const bool exact = p.reduce == Reduce::max || p.reduce == Reduce::min;
  for_row_ranges(g, threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = g.indptr[i], end = g.indptr[i + 1];
      if (begin == end)
        empty_row(p, p.row_at(i));
      else if (end - begin <= (exact ? kHubRow : kPiece))
        one_row(p.row_at(i), begin, end, nullptr);
      else if (end - begin <= kHubRow)
        row_in_pieces(p, i, 1, one_row);
    }
  });
  if (g.nnz <= kHubRow) return;
  for (int64_t i = 0; i < g.num_rows; ++i)
    if (g.indptr[i + 1] - g.indptr[i] > kHubRow) row_in_pieces(p, i, threads, one_row);
}

template <class K, class T, class I>
void run_vector(const Problem<T, I>& p, int threads) {
  constexpr int L = kLanes<T>;
  constexpr bool kHeads = K::kRhs == Rhs::group;
  const int64_t head = kHeads ? p.rhs.div : p.num_feats;
  const auto narrow = [&](auto count) {
    walk(p, threads, [&](int64_t row, int64_t k0, int64_t k1, const Partial<Acc<T>>* partial) {
      narrow_row<K, count>(p, row, k0, k1, partial);
    });
  };
  if (head == 1) return narrow(std::integral_constant<int, 1>{});
  if (head == 2) return narrow(std::integral_constant<int, 2>{});
  if (head == 3) return narrow(std::integral_constant<int, 3>{});
  // Vectors must not straddle heads. Where heads hold a whole number of some, the features are taken without regard to
  // them; else head by head.
  const int64_t whole = kHeads ? (head & -head) : head;
  const auto with = [&](auto lanes) {
    constexpr int N = decltype(lanes)::value;
    const int64_t step = whole >= N ? p.num_feats : head;
    walk(p, threads, [&](int64_t row, int64_t k0, int64_t k1, const Partial<Acc<T>>* partial) {
      for (int64_t d = 0; d < p.num_feats; d += step) features<K, N>(p, row, k0, k1, d, d + step, partial);
    });
  };
  const int64_t width = whole >= 4 ? whole : head;
  if (width >= L) return with(std::integral_constant<int, L>{});
  if constexpr (L > 8)
    if (width >= 8) return with(std::integral_constant<int, 8>{});
  with(std::integral_constant<int, std::min(L, 4)>{});
}

// By vectors, if these serve what is asked for.
template <class T, class I>
bool run_fast(const Problem<T, I>& p, int threads) {
  using M = Message;
  const int64_t feats = p.num_feats;
  const bool extreme = p.reduce == Reduce::max || p.reduce == Reduce::min;
  if (p.message != M::copy_rhs && p.lhs.len != feats) return false;
  if (p.fused.scales_sources()) {
    run_vector<Kind<false, M::mul, Rhs::source, false>>(p, threads);
  } else if (p.message == M::copy_lhs) {
    extreme ? run_vector<Kind<false, M::copy_lhs, Rhs::none, true>>(p, threads)
            : run_vector<Kind<false, M::copy_lhs, Rhs::none, false>>(p, threads);
  } else if (p.message == M::copy_rhs) {
    if (p.rhs.len != feats) return false;
    extreme ? run_vector<Kind<true, M::copy_rhs, Rhs::none, true>>(p, threads)
            : run_vector<Kind<true, M::copy_rhs, Rhs::none, false>>(p, threads);
  } else if (extreme) {
    return false;
  } else if (p.rhs.len == feats) {
    p.message == M::mul ? run_vector<Kind<false, M::mul, Rhs::full, false>>(p, threads)
                        : run_vector<Kind<false, M::add, Rhs::full, false>>(p, threads);
  } else if (p.message == M::mul && p.rhs.len == 1) {
    run_vector<Kind<false, M::mul, Rhs::scalar, false>>(p, threads);
  } else if (p.message == M::mul && p.rhs.div > 1) {
    run_vector<Kind<false, M::mul, Rhs::group, false>>(p, threads);
  } else {
    return false;
  }
  return true;
}

template <class T, class I>
void run(const SpmmArgs& a) {
  const Problem<T, I> p{CsrOf<I>(a.graph),
                        static_cast<const I*>(a.out_rows),
                        a.lhs,
                        a.rhs,
                        static_cast<T*>(a.out),
                        static_cast<I*>(a.arg_lhs),
                        static_cast<I*>(a.arg_rhs),
                        a.num_feats,
                        a.message,
                        a.reduce,
                        a.empty_value,
                        a.fused};
  const int threads = useful_threads((a.graph.nnz + a.graph.num_rows) * a.num_feats, a.threads);
  if (run_fast(p, threads)) return;
  const int64_t feats = p.num_feats;
  with_lanes<T>(std::gcd(unbroken(p.lhs, feats), unbroken(p.rhs, feats)), feats, [&](auto lanes) {
    const Places<lanes> lhs(p.lhs, feats), rhs(p.rhs, feats);
    walk(p, threads, [&](int64_t row, int64_t k0, int64_t k1, const Partial<Acc<T>>* partial) {
      broadcast_row(p, lhs, rhs, row, k0, k1, partial);
    });
  });
}

}  // namespace

void spmm(const SpmmArgs& a) {
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
