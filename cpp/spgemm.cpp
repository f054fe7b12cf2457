// Products with rows that keep k of their features (MaxK-GNN, ASPLOS 2024). Forward: each edge scatters the k values of
// its source into a dense row that stays in L1. Backward: by source, each edge gathers k values of a gradient row,
// hence reads most of that row from memory; or by destination, where the gradient row is at hand and the k sums of the
// source are read and written. Long rows are summed in pieces, as in spmm.cpp, hubs in parallel.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "fused.h"
#include "isa.h"
#include "rows.h"
#include "simd.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace gnnaccel::GNNACCEL_ISA {
namespace {

constexpr int64_t kMaxRanges = 16;  // of sources; every one walks all indices
constexpr int64_t kBatch = 512;     // nonzeros of a range collected at a time
// Instead of kPrefetchAhead where short rows are gathered, which take less time; Zen 5: 16 to 32 take 15 to 25 % less
// than 8.
constexpr int64_t kShortAhead = 20;
constexpr int64_t kMaxPrefetch = 512;  // bytes; what lies behind them the hardware has guessed

// The cache lines of `bytes` at `from`. Inlined by force: see prefetch.
[[gnu::always_inline]] inline void prefetch_bytes(const void* from, int64_t bytes) {
  const char* end = static_cast<const char*>(from) + std::min(bytes, kMaxPrefetch);
  const auto* line = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(from) & ~uintptr_t{63});
  for (; line < end; line += 64) __builtin_prefetch(line);
}

// ---- Four values at four places. Zen 5, 32 of 256: 12 ns an edge; 15 one by one, 19 by AVX-512's scatter. ----

template <class Place>
struct Places {  // loaded at once: there are enough loads without them
  std::conditional_t<sizeof(Place) == 1, uint32_t, uint64_t> word;

  explicit Places(const Place* from) { std::memcpy(&word, from, sizeof(word)); }
  [[gnu::always_inline]] int64_t operator[](int i) const { return static_cast<Place>(word >> (8 * sizeof(Place) * i)); }
};

template <class A, class Place>
inline void scatter(const Place* place, Vec<A, 4> x, A* sum) {
  const Places<Place> at(place);
#if defined(__SSE2__)
  if constexpr (std::is_same_v<A, float>) {  // GCC takes values out of x in a slower way
    const auto v = reinterpret_cast<__m128>(x);
    const auto add = [&](int64_t d, __m128 value) { _mm_store_ss(sum + d, _mm_add_ss(_mm_load_ss(sum + d), value)); };
    add(at[0], v);
    add(at[1], _mm_shuffle_ps(v, v, 1));
    add(at[2], _mm_shuffle_ps(v, v, 2));
    add(at[3], _mm_shuffle_ps(v, v, 3));
    return;
  }
#endif
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) sum[at[i]] += x[i];
}

template <class T, class Place>
inline Vec<Acc<T>, 4> gather(const Place* place, const T* from) {
  const Places<Place> at(place);
  return Vec<Acc<T>, 4>{widen(from[at[0]]), widen(from[at[1]]), widen(from[at[2]]), widen(from[at[3]])};
}

// ---- Sums of rows into a buffer of `width`. ----

// The sum of `count` pieces at `parts`, into the first of them: in f64, as of a hub there are many.
template <class A>
void add_up(A* parts, int64_t count, int64_t width) {
  for (int64_t d = 0; d < width; ++d) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += parts[i * width + d];
    parts[d] = static_cast<A>(sum);
  }
}

// For every row finish(row, sum), where add(row, k0, k1, sum) has added the nonzeros k0 .. k1 to zeros.
template <class A, class I, class Add, class Finish>
void sum_rows(const CsrOf<I>& g, int64_t width, int threads, const Add& add, const Finish& finish) {
  for_row_ranges(g, threads, [&](int64_t first, int64_t last) {
    const Buffer<A> sums(2 * width);
    for (int64_t row = first; row < last; ++row) {
      const int64_t begin = g.indptr[row], end = g.indptr[row + 1];
      if (end - begin > kHubRow) continue;
      std::fill(sums.get(), sums.get() + width, A(0));
      add(row, begin, std::min(end, begin + kShortPiece), sums.get());
      for (int64_t k = begin + kShortPiece; k < end; k += kShortPiece) {
        std::fill(sums.get() + width, sums.get() + 2 * width, A(0));
        add(row, k, std::min(end, k + kShortPiece), sums.get() + width);
        add_up(sums.get(), 2, width);
      }
      finish(row, sums.get());
    }
  });
  if (g.nnz <= kHubRow) return;
  for (int64_t row = 0; row < g.num_rows; ++row) {
    const int64_t begin = g.indptr[row], end = g.indptr[row + 1], count = (end - begin + kShortPiece - 1) / kShortPiece;
    if (end - begin <= kHubRow) continue;
    const Buffer<A> parts(count * width);
    parallel_for(count, threads, [&](int64_t i) {
      A* part = parts.get() + i * width;
      std::fill(part, part + width, A(0));
      add(row, begin + i * kShortPiece, std::min(end, begin + (i + 1) * kShortPiece), part);
    });
    add_up(parts.get(), count, width);
    finish(row, parts.get());
  }
}

// ---- Forward. ----

template <class T, class I, class Place>
struct Forward {
  CsrOf<I> graph;
  const T* values;
  const Place* places;
  const T* weight;
  T* out;
  int64_t k, num_feats;
  const Fused& fused;

  void add(int64_t n0, int64_t n1, Acc<T>* sum) const {
    for (int64_t n = n0; n < n1; ++n) {
      if (n + kShortAhead < graph.nnz) {
        const int64_t next = static_cast<int64_t>(graph.indices[n + kShortAhead]) * k;
        prefetch_bytes(values + next, k * sizeof(T));
        prefetch_bytes(places + next, k * sizeof(Place));
        if (weight && graph.edge_ids) prefetch<1>(weight + graph.edge_ids[n + kShortAhead]);
      }
      const int64_t at = static_cast<int64_t>(graph.indices[n]) * k;
      const Acc<T> scale = weight ? widen(weight[graph.edge(n)]) : Acc<T>(1);
      int64_t j = 0;
#pragma GCC unroll 4
      for (; j + 4 <= k; j += 4) scatter<Acc<T>>(places + at + j, load<4>(values + at + j) * scale, sum);
      for (; j < k; ++j) sum[places[at + j]] += widen(values[at + j]) * scale;
    }
  }

  void finish(int64_t row, const Acc<T>* sum) const {
    constexpr int N = kLanes<T>;
    T* to = out + row * num_feats;
    int64_t d = 0;
    for (; d + N <= num_feats; d += N) store<N>(to + d, epilogue<N, T>(fused, load<N>(sum + d), row, d, num_feats));
    for (; d < num_feats; ++d) narrow(epilogue<1, T>(fused, splat<1>(sum[d]), row, d, num_feats)[0], to + d);
  }
};

template <class T, class I, class Place>
void forward(const SpgemmArgs& a, int threads) {
  const Forward<T, I, Place> p{CsrOf<I>(a.graph),
                               static_cast<const T*>(a.x.values),
                               static_cast<const Place*>(a.x.places),
                               static_cast<const T*>(a.weight),
                               static_cast<T*>(a.out),
                               a.x.k,
                               a.x.num_feats,
                               a.fused};
  sum_rows<Acc<T>>(
      p.graph, p.num_feats, threads, [&](int64_t, int64_t n0, int64_t n1, Acc<T>* sum) { p.add(n0, n1, sum); },
      [&](int64_t row, const Acc<T>* sum) { p.finish(row, sum); });
}

// ---- Backward. ----

// One gradient row of at most 256 features in f32, gathered from by permutations of registers.
template <class A, class Place>
struct Table {
  static bool serves(int64_t) { return false; }
  template <class T>
  void fill(int64_t, const T*, int64_t) {}
  void add_gathered(const Place*, A, A*, int64_t) const {}
};

#if defined(__AVX512F__)
template <>
struct Table<float, uint8_t> {
  float values[256] = {};  // what lies behind the row no place names
  int64_t held = -1;

  static bool serves(int64_t k) { return k >= 8; }

  template <class T>
  void fill(int64_t row, const T* from, int64_t num_feats) {
    if (row == held) return;
    held = row;
    for (int64_t d = 0; d < num_feats; ++d) values[d] = widen(from[d]);
  }

  // to[j] += scale * values[place[j]]. Half the time of loads one by one (Zen 5, 32 of 256).
  void add_gathered(const uint8_t* place, float scale, float* to, int64_t k) const {
    __m512 row[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) row[i] = _mm512_loadu_ps(values + 16 * i);
    for (int64_t j = 0; j < k; j += 16) {
      const auto some = static_cast<__mmask16>(k - j >= 16 ? 0xffff : (1 << (k - j)) - 1);
      const __m512i at = _mm512_maskz_cvtepu8_epi32(some, _mm_maskz_loadu_epi8(some, place + j));
      __m512 found[8];  // by the lower five bits of a place; then the next three choose
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) found[i] = _mm512_permutex2var_ps(row[2 * i], at, row[2 * i + 1]);
#pragma GCC unroll 3
      for (int half = 4, bit = 32; half; half /= 2, bit *= 2) {
        const __mmask16 upper = _mm512_test_epi32_mask(at, _mm512_set1_epi32(bit));
#pragma GCC unroll 4
        for (int i = 0; i < half; ++i) found[i] = _mm512_mask_blend_ps(upper, found[2 * i], found[2 * i + 1]);
      }
      const __m512 sum = _mm512_fmadd_ps(_mm512_set1_ps(scale), found[0], _mm512_maskz_loadu_ps(some, to + j));
      _mm512_mask_storeu_ps(to + j, some, sum);
    }
  }
};
#endif

// Sums of sources of more than kShortPiece nonzeros, which lose digits in f32: whenever so many have been added to one,
// what has come together goes on to a sum of pieces in f64.
template <class A>
class Pieces {
 public:
  // For the sources first .. last - 1 of k entries each; no sum is of more than `most` nonzeros.
  Pieces(int64_t first, int64_t last, int64_t k, int64_t most)
      : first_(first), k_(k), size_(most > kShortPiece && sizeof(A) == 4 ? last - first : 0), counts_(size_) {
    std::fill_n(counts_.get(), size_, 0);
  }
  ~Pieces() {
    for (int64_t i = 0; sums_ && i < size_; ++i) delete[] sums_[i];
    delete[] sums_;
  }
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  // One more nonzero has been added to `sum`, that of `source`.
  void added(int64_t source, A* sum) {
    if (size_ && ++counts_[source - first_] == kShortPiece) move(source - first_, sum);
  }

  // Adds the pieces to the sums of all sources.
  void finish(A* sums) const {
    for (int64_t i = 0; sums_ && i < size_; ++i)
      for (int64_t j = 0; sums_[i] && j < k_; ++j) {
        A& sum = sums[(first_ + i) * k_ + j];
        sum = static_cast<A>(sums_[i][j] + sum);
      }
  }

 private:
  void move(int64_t i, A* sum) {
    counts_[i] = 0;
    if (!sums_) sums_ = new double*[static_cast<size_t>(size_)]();
    if (!sums_[i]) sums_[i] = new double[static_cast<size_t>(k_)]();
    for (int64_t j = 0; j < k_; ++j) {
      sums_[i][j] += sum[j];
      sum[j] = 0;
    }
  }

  int64_t first_, k_, size_;
  Buffer<int32_t> counts_;  // nonzeros in the present piece of each source
  double** sums_ = nullptr;
};

template <class T, class I, class Place>
struct Backward {
  CsrOf<I> graph;
  const T* grad;
  const Place* places;
  const T* weight;
  const Acc<T>* row_scale;
  Acc<T>* grad_values;
  int64_t k, num_feats;

  // What nonzero n of gradient row `row` is multiplied with.
  Acc<T> scale(int64_t n, int64_t row) const {
    const Acc<T> scale = weight ? widen(weight[graph.edge(n)]) : Acc<T>(1);
    return row_scale ? scale * row_scale[row] : scale;
  }

  // to[j] += scale * from[place[j]].
  void add_gathered(const T* from, const Place* place, Acc<T> scale, Acc<T>* to) const {
    int64_t j = 0;
#pragma GCC unroll 4
    for (; j + 4 <= k; j += 4) store<4>(to + j, load<4>(to + j) + gather(place + j, from) * scale);
    for (; j < k; ++j) to[j] += widen(from[place[j]]) * scale;
  }

  // By source: nonzeros n0 .. n1 of row `source` of the transposed graph. What is needed of a short gradient row is
  // most of it; of a long one, of the same source, the features.
  void add(int64_t source, int64_t n0, int64_t n1, Acc<T>* sum) const {
    const Place* place = places + source * k;
    const int64_t bytes = num_feats * static_cast<int64_t>(sizeof(T));
    for (int64_t n = n0; n < n1; ++n) {
      if (n + kPrefetchAhead < graph.nnz) {
        if (weight && graph.edge_ids) prefetch<1>(weight + graph.edge_ids[n + kPrefetchAhead]);
        const T* next = grad + static_cast<int64_t>(graph.indices[n + kPrefetchAhead]) * num_feats;
        if (bytes <= 64 * k)
          for (int64_t b = 0; b < bytes; b += 64) prefetch<1>(reinterpret_cast<const char*>(next) + b);
        else if (n + kPrefetchAhead < n1)
          for (int64_t j = 0; j < k; ++j) prefetch<1>(next + place[j]);
      }
      const int64_t row = graph.indices[n];
      add_gathered(grad + row * num_feats, place, scale(n, row), sum);
    }
  }

  // By destination: what nonzero n of row `row` adds to its source. `next` is a nonzero that comes later.
  void add_to_source(int64_t row, int64_t n, int64_t next, Table<Acc<T>, Place>& table, Pieces<Acc<T>>& pieces) const {
    const int64_t ahead = static_cast<int64_t>(graph.indices[next]) * k;
    prefetch_bytes(places + ahead, k * sizeof(Place));
    prefetch_bytes(grad_values + ahead, k * sizeof(Acc<T>));
    if (weight && graph.edge_ids) prefetch<1>(weight + graph.edge_ids[next]);
    const int64_t source = graph.indices[n], at = source * k;
    const T* from = grad + row * num_feats;
    if (table.serves(k)) {
      table.fill(row, from, num_feats);
      table.add_gathered(places + at, scale(n, row), grad_values + at, k);
    } else {
      add_gathered(from, places + at, scale(n, row), grad_values + at);
    }
    pieces.added(source, grad_values + at);
  }

  void all_sources(int64_t num_sources) const {
    Table<Acc<T>, Place> table;
    Pieces<Acc<T>> pieces(0, num_sources, k, graph.nnz);
    for (int64_t row = 0; row < graph.num_rows; ++row)
      for (int64_t n = graph.indptr[row]; n < static_cast<int64_t>(graph.indptr[row + 1]); ++n)
        add_to_source(row, n, std::min(n + kShortAhead, graph.nnz - 1), table, pieces);
    pieces.finish(grad_values);
  }

  // The sources first .. last alone. Their nonzeros are collected without a branch on the source, which nothing could
  // predict, and then worked off.
  void some_sources(I first, I last) const {
    using U = std::make_unsigned_t<I>;
    const U span = static_cast<U>(last) - static_cast<U>(first);
    I nonzero[2 * kBatch], row_of[2 * kBatch];
    Table<Acc<T>, Place> table;
    Pieces<Acc<T>> pieces(first, last, k, graph.nnz);
    int64_t count = 0;
    const auto work_off = [&] {
      for (int64_t i = 0; i < count; ++i)
        add_to_source(row_of[i], nonzero[i], nonzero[std::min(i + kShortAhead, count - 1)], table, pieces);
      count = 0;
    };
    for (int64_t row = 0; row < graph.num_rows; ++row) {
      const int64_t end = graph.indptr[row + 1];
      for (int64_t begin = graph.indptr[row]; begin < end; begin += kBatch) {
        for (int64_t n = begin; n < std::min(end, begin + kBatch); ++n) {
          nonzero[count] = static_cast<I>(n);
          row_of[count] = static_cast<I>(row);
          count += static_cast<U>(graph.indices[n]) - static_cast<U>(first) < span;
        }
        if (count >= kBatch) work_off();
      }
    }
    work_off();
    pieces.finish(grad_values);
  }
};

template <class T, class I, class Place>
void backward(const SspmmArgs& a, int threads) {
  using A = Acc<T>;
  const Backward<T, I, Place> p{CsrOf<I>(a.graph),
                                static_cast<const T*>(a.grad),
                                static_cast<const Place*>(a.kept.places),
                                static_cast<const T*>(a.weight),
                                static_cast<const A*>(a.row_scale),
                                static_cast<A*>(a.grad_values),
                                a.kept.k,
                                a.kept.num_feats};
  if (a.by_source)
    return sum_rows<A>(
        p.graph, p.k, threads, [&](int64_t row, int64_t n0, int64_t n1, A* sum) { p.add(row, n0, n1, sum); },
        [&](int64_t row, const A* sum) { std::copy(sum, sum + p.k, p.grad_values + row * p.k); });
  const int64_t ranges = std::min<int64_t>(threads, kMaxRanges), sources = a.graph.num_cols;
  if (ranges <= 1) return p.all_sources(sources);
  parallel_for(ranges, threads, [&](int64_t i) {
    p.some_sources(static_cast<I>(sources * i / ranges), static_cast<I>(sources * (i + 1) / ranges));
  });
}

// body(T, I, Place) as values of these types, their contents meaningless.
template <class Body>
void for_types(DType dtype, IndexType index_type, int64_t num_feats, const Body& body) {
  const auto with = [&](auto value) {
    const auto place = [&](auto index) {
      num_feats <= 256 ? body(value, index, uint8_t{}) : body(value, index, uint16_t{});
    };
    index_type == IndexType::i64 ? place(int64_t{}) : place(int32_t{});
  };
  dtype == DType::f64 ? with(double{}) : dtype == DType::bf16 ? with(bf16{}) : with(float{});
}

}  // namespace

void spgemm(const SpgemmArgs& a) {
  const int threads = useful_threads(a.graph.nnz * a.x.k + a.graph.num_rows * a.x.num_feats, a.threads);
  for_types(a.dtype, a.graph.index_type, a.x.num_feats, [&](auto value, auto index, auto place) {
    forward<decltype(value), decltype(index), decltype(place)>(a, threads);
  });
}

void sspmm(const SspmmArgs& a) {
  const int threads = useful_threads(a.graph.nnz * a.kept.k, a.threads);
  for_types(a.dtype, a.graph.index_type, a.kept.num_feats, [&](auto value, auto index, auto place) {
    backward<decltype(value), decltype(index), decltype(place)>(a, threads);
  });
}

}  // namespace gnnaccel::GNNACCEL_ISA
