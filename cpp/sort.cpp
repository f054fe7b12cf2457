// Stable counting sorts: COO to CSR, and the transpose, and what is made of their counts. Each task counts its own
// share of the nonzeros per key; a prefix over (key, task) then gives every task its own places, so the result is that
// of one thread.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "rows.h"

namespace gnnaccel {
namespace {

// Number of shares: each needs its own table of num_keys counters, which must stay small beside the nonzeros.
int64_t num_shares(int64_t nnz, int64_t num_keys, int threads) {
  const int64_t affordable = num_keys ? nnz / num_keys + 1 : 1;
  return std::clamp<int64_t>(useful_threads(nnz, threads), 1, affordable);
}

// visit(share, body) and again(share, body) call body(k, key) for the share's nonzeros in ascending order, with the
// same keys both; emit(k, place) gets the place of nonzero k in the order of (key, k).
template <class O, class Visit, class Again, class Emit>
void counting_sort(int64_t num_keys, int64_t shares, int threads, O* indptr, const Visit& visit, const Again& again,
                   const Emit& emit) {
  std::vector<O> counts(static_cast<size_t>(shares * num_keys), 0);
  parallel_for(shares, threads, [&](int64_t s) {
    O* mine = counts.data() + s * num_keys;
    visit(s, [mine](int64_t, int64_t key) { ++mine[key]; });
  });
  O place = 0;
  for (int64_t key = 0; key < num_keys; ++key) {
    indptr[key] = place;
    for (int64_t s = 0; s < shares; ++s) {
      const O count = counts[s * num_keys + key];
      counts[s * num_keys + key] = place;
      place += count;
    }
  }
  indptr[num_keys] = place;
  parallel_for(shares, threads, [&](int64_t s) {
    O* mine = counts.data() + s * num_keys;
    again(s, [mine, &emit](int64_t k, int64_t key) { emit(k, mine[key]++); });
  });
}

// One read of memory that somebody else may be writing to: what is checked is what is used.
template <class I>
I read_once(const I* at) {
  return *static_cast<const volatile I*>(at);
}

// A look at a few pairs, so that rows which descend late cost no pass: some all over, and some ever closer to the end,
// where self-loops stand that were added to edges in order.
template <class I>
bool seem_in_order(const I* rows, int64_t nnz) {
  constexpr int64_t kLooks = 64;
  if (nnz < 16 * kLooks) return true;
  I last = read_once(rows);
  const auto ascends = [&](int64_t k) {
    const I before = last;
    return before <= (last = read_once(rows + k));
  };
  for (int64_t i = 1; i < kLooks; ++i)
    if (!ascends(nnz * i / kLooks)) return false;
  last = read_once(rows);
  int64_t back = 1;
  while (back * 2 < nnz) back *= 2;
  for (; back; back /= 2)
    if (!ascends(nnz - back)) return false;
  return true;
}

// The rows of a share of the pairs, the first and the last: what lies between two shares is filled in after both.
struct Ends {
  int64_t first, last;
};

// Copies pairs that come by ascending rows. Returns -1, 1 + the position of a pair out of range, or 0 as soon as a row
// descends: the outputs are undefined then. One pass. Inlined it made the sort of other orders 8 % slower (GCC 12,
// EPYC).
template <class I, class O>
[[gnu::noinline]] int64_t copy_in_order(const I* rows, const I* cols, int64_t nnz, int64_t num_rows, int64_t num_cols,
                                        O* indptr, O* indices, int threads) {
  if (!seem_in_order(rows, nnz)) return 0;
  const int64_t shares = std::max<int64_t>(1, std::min<int64_t>(useful_threads(nnz, threads), nnz));
  const auto begin = [&](int64_t s) { return nnz * s / shares; };
  std::atomic<int64_t> bad{0};
  std::atomic<bool> descends{false};
  std::vector<Ends> ends(static_cast<size_t>(shares), Ends{0, 0});
  parallel_for(shares, threads, [&](int64_t s) {
    int64_t last = -1;
    for (int64_t k = begin(s), end = begin(s + 1); k < end; ++k) {
      const I row = read_once(rows + k), col = read_once(cols + k);
      if (row < 0 || row >= num_rows || col < 0 || col >= num_cols) return bad.store(k + 1, std::memory_order_relaxed);
      if (row < last) return descends.store(true, std::memory_order_relaxed);
      if (last < 0) last = ends[s].first = row;
      while (last < row) indptr[++last] = static_cast<O>(k);
      indices[k] = static_cast<O>(col);
    }
    ends[s].last = last;
  });
  if (bad.load()) return bad.load();
  int64_t last = -1;
  for (int64_t s = 0; s < shares && nnz && !descends.load(); ++s) {
    if (ends[s].first < last) descends.store(true);
    while (last < ends[s].first) indptr[++last] = static_cast<O>(begin(s));
    last = ends[s].last;
  }
  if (descends.load()) return 0;
  std::fill(indptr + last + 1, indptr + num_rows + 1, static_cast<O>(nnz));
  return -1;
}

template <class I, class O>
int64_t sort_coo(const I* rows, const I* cols, int64_t nnz, int64_t num_rows, int64_t num_cols, O* indptr, O* indices,
                 O* edge_ids, int threads) {
  if (const int64_t found = copy_in_order(rows, cols, nnz, num_rows, num_cols, indptr, indices, threads)) return found;
  const int64_t shares = num_shares(nnz, num_rows, threads);
  std::atomic<int64_t> bad{0};
  // Both visits must find the same rows: the first one writes them down, in half the bytes.
  std::unique_ptr<O[]> keys(new O[static_cast<size_t>(nnz)]);
  const auto begin = [&](int64_t s) { return nnz * s / shares; };
  counting_sort(
      num_rows, shares, threads, indptr,
      [&](int64_t s, const auto& body) {
        for (int64_t k = begin(s), end = begin(s + 1); k < end; ++k) {
          I row = read_once(rows + k);
          if (row < 0 || row >= num_rows) {
            bad.store(k + 1, std::memory_order_relaxed);
            row = 0;
          }
          body(k, keys[k] = static_cast<O>(row));
        }
      },
      [&](int64_t s, const auto& body) {
        for (int64_t k = begin(s), end = begin(s + 1); k < end; ++k) body(k, keys[k]);
      },
      [&](int64_t k, O place) {
        const I col = read_once(cols + k);
        if (col < 0 || col >= num_cols) bad.store(k + 1, std::memory_order_relaxed);
        indices[place] = static_cast<O>(col);
        edge_ids[place] = static_cast<O>(k);
      });
  return bad.load();
}

// The same of pairs of a square matrix without its loops (dropped) or with them, and of one loop for each row behind
// them. Returns the nonzeros, or -1. A pair that is dropped has key -1; the first visit makes keys of rows, the second
// one ids of those.
template <class I, class O>
int64_t sort_looped(const I* rows, const I* cols, int64_t nnz, int64_t num_rows, bool dropped, O* indptr, O* indices,
                    O* edge_ids, int threads) {
  const int64_t shares = num_shares(nnz, num_rows, threads);
  std::atomic<bool> bad{false};
  std::unique_ptr<O[]> keys(new O[static_cast<size_t>(nnz + num_rows)]);
  std::vector<int64_t> kept(static_cast<size_t>(shares), 0);  // by each share
  const auto begin = [&](int64_t s) { return nnz * s / shares; };
  counting_sort(
      num_rows, shares, threads, indptr,
      [&](int64_t s, const auto& body) {
        int64_t count = 0;
        for (int64_t k = begin(s), end = begin(s + 1); k < end; ++k) {
          const I row = read_once(rows + k);
          keys[k] = -1;
          if (row < 0 || row >= num_rows) {
            bad.store(true, std::memory_order_relaxed);
          } else if (!dropped || row != read_once(cols + k)) {
            body(k, keys[k] = static_cast<O>(row));
            ++count;
          }
        }
        kept[s] = count;
        if (s == shares - 1)
          for (int64_t row = 0; row < num_rows; ++row) body(nnz + row, row);
      },
      [&](int64_t s, const auto& body) {
        O id = static_cast<O>(std::accumulate(kept.begin(), kept.begin() + s, int64_t{0}));
        for (int64_t k = begin(s), end = begin(s + 1); k < end; ++k) {
          const O row = keys[k];
          if (row < 0) continue;
          keys[k] = id++;
          body(k, row);
        }
        if (s == shares - 1)
          for (int64_t row = 0; row < num_rows; ++row) {
            keys[nnz + row] = id++;
            body(nnz + row, row);
          }
      },
      [&](int64_t k, O place) {
        const I col = k < nnz ? read_once(cols + k) : static_cast<I>(k - nnz);
        if (col < 0 || col >= num_rows) bad.store(true, std::memory_order_relaxed);
        indices[place] = static_cast<O>(col);
        edge_ids[place] = keys[k];
      });
  return bad.load() ? -1 : static_cast<int64_t>(indptr[num_rows]);
}

template <class I>
void transpose_of(const Csr& graph, I* t_indptr, I* t_indices, I* t_edge_ids, int threads) {
  const CsrOf<I> g(graph);
  const int64_t shares = num_shares(g.nnz, graph.num_cols, threads);
  // Rows are expanded once: the sort visits nonzeros twice, and rows only matter when one is placed.
  std::vector<I> row_at(static_cast<size_t>(g.nnz));
  parallel_for(shares, threads, [&](int64_t s) {
    const int64_t begin = g.nnz * s / shares, end = g.nnz * (s + 1) / shares;
    if (begin == end) return;
    int64_t row = row_of(g, begin);
    for (int64_t k = begin; k < end; ++k) {
      while (g.indptr[row + 1] <= k) ++row;
      row_at[k] = static_cast<I>(row);
    }
  });
  const auto visit = [&](int64_t s, const auto& body) {
    for (int64_t k = g.nnz * s / shares; k < g.nnz * (s + 1) / shares; ++k) body(k, g.indices[k]);
  };
  counting_sort(graph.num_cols, shares, threads, t_indptr, visit, visit, [&](int64_t k, I place) {
    t_indices[place] = row_at[k];
    t_edge_ids[place] = static_cast<I>(g.edge(k));
  });
}

template <class I>
int64_t sort_into(const void* rows, const void* cols, int64_t nnz, int64_t num_rows, int64_t num_cols, void* indptr,
                  void* indices, void* edge_ids, IndexType out_type, int threads) {
  const auto* r = static_cast<const I*>(rows);
  const auto* c = static_cast<const I*>(cols);
  if (out_type == IndexType::i64)
    return sort_coo(r, c, nnz, num_rows, num_cols, static_cast<int64_t*>(indptr), static_cast<int64_t*>(indices),
                    static_cast<int64_t*>(edge_ids), threads);
  return sort_coo(r, c, nnz, num_rows, num_cols, static_cast<int32_t*>(indptr), static_cast<int32_t*>(indices),
                  static_cast<int32_t*>(edge_ids), threads);
}

template <class I>
int64_t sort_looped_into(const void* rows, const void* cols, int64_t nnz, int64_t num_rows, bool dropped, void* indptr,
                         void* indices, void* edge_ids, IndexType out_type, int threads) {
  const auto* r = static_cast<const I*>(rows);
  const auto* c = static_cast<const I*>(cols);
  if (out_type == IndexType::i64)
    return sort_looped(r, c, nnz, num_rows, dropped, static_cast<int64_t*>(indptr), static_cast<int64_t*>(indices),
                       static_cast<int64_t*>(edge_ids), threads);
  return sort_looped(r, c, nnz, num_rows, dropped, static_cast<int32_t*>(indptr), static_cast<int32_t*>(indices),
                     static_cast<int32_t*>(edge_ids), threads);
}

template <class I, class T>
void inverse_roots_of(const I* indptr, int64_t num_rows, T* out, int threads) {
  const int64_t shares = useful_threads(num_rows, threads);
  parallel_for(shares, threads, [&](int64_t s) {
    for (int64_t row = num_rows * s / shares, end = num_rows * (s + 1) / shares; row < end; ++row) {
      const I degree = indptr[row + 1] - indptr[row];
      out[row] = degree ? 1 / std::sqrt(static_cast<T>(degree)) : T(0);
    }
  });
}

template <class I>
void inverse_roots_into(const void* indptr, int64_t num_rows, void* out, DType dtype, int threads) {
  const auto* offsets = static_cast<const I*>(indptr);
  if (dtype == DType::f64) return inverse_roots_of(offsets, num_rows, static_cast<double*>(out), threads);
  inverse_roots_of(offsets, num_rows, static_cast<float*>(out), threads);
}

}  // namespace

int64_t coo_to_looped_csr(const void* rows, const void* cols, int64_t nnz, int64_t num_rows, bool dropped,
                          IndexType in_type, void* indptr, void* indices, void* edge_ids, IndexType out_type,
                          int threads) {
  const auto sort = in_type == IndexType::i64 ? sort_looped_into<int64_t> : sort_looped_into<int32_t>;
  return sort(rows, cols, nnz, num_rows, dropped, indptr, indices, edge_ids, out_type, threads);
}

int64_t coo_to_csr(const void* rows, const void* cols, int64_t nnz, int64_t num_rows, int64_t num_cols,
                   IndexType in_type, void* indptr, void* indices, void* edge_ids, IndexType out_type, int threads) {
  const auto sort = in_type == IndexType::i64 ? sort_into<int64_t> : sort_into<int32_t>;
  return sort(rows, cols, nnz, num_rows, num_cols, indptr, indices, edge_ids, out_type, threads);
}

void transpose(const Csr& graph, void* t_indptr, void* t_indices, void* t_edge_ids, int threads) {
  if (graph.index_type == IndexType::i64)
    transpose_of(graph, static_cast<int64_t*>(t_indptr), static_cast<int64_t*>(t_indices),
                 static_cast<int64_t*>(t_edge_ids), threads);
  else
    transpose_of(graph, static_cast<int32_t*>(t_indptr), static_cast<int32_t*>(t_indices),
                 static_cast<int32_t*>(t_edge_ids), threads);
}

void inverse_roots(const void* indptr, int64_t num_rows, IndexType type, void* out, DType dtype, int threads) {
  const auto fill = type == IndexType::i64 ? inverse_roots_into<int64_t> : inverse_roots_into<int32_t>;
  fill(indptr, num_rows, out, dtype, threads);
}

void spmm_transposed(const Csr& graph, const void* x, const void* weight, void* out, int64_t num_feats, DType dtype,
                     const Fused& fused, int threads) {
  const int64_t bytes = graph.index_type == IndexType::i64 ? 8 : 4;
  const std::unique_ptr<int64_t[]> memory(new int64_t[(bytes * (graph.num_cols + 1 + 2 * graph.nnz) + 7) / 8]);
  auto* indptr = reinterpret_cast<char*>(memory.get());
  char* indices = indptr + bytes * (graph.num_cols + 1);
  char* edge_ids = indices + bytes * graph.nnz;
  transpose(graph, indptr, indices, edge_ids, threads);
  const Csr transposed{
      indptr, indices, weight ? edge_ids : nullptr, graph.num_cols, graph.num_rows, graph.nnz, graph.index_type, 0};
  spmm(transposed, nullptr, {x, num_feats, 1}, {weight, 1, 1}, out, nullptr, nullptr, num_feats,
       weight ? Message::mul : Message::copy_lhs, Reduce::sum, dtype, 0.0, fused, threads);
}

}  // namespace gnnaccel
