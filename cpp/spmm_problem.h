// One SpMM on the CPU: what it is given, and how results are written.
#pragma once

#include "fused.h"
#include "isa.h"
#include "rows.h"
#include "simd.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

// What to compute for which rows; T is the storage type, I the index type.
template <class T, class I>
struct Problem {
  CsrOf<I> graph;
  const I* out_rows;  // one for each row of the graph; null: the same
  Operand lhs, rhs;
  T* out;
  I* arg_lhs;
  I* arg_rhs;
  int64_t num_feats;
  Message message;
  Reduce reduce;
  double empty_value;
  Fused fused;

  int64_t row_at(int64_t i) const { return out_rows ? static_cast<int64_t>(out_rows[i]) : i; }
  const T* lhs_data() const { return static_cast<const T*>(lhs.data); }
  const T* rhs_data() const { return static_cast<const T*>(rhs.data); }
};

// What scales the source of nonzero k, with its weight if it has one.
template <class T, class I>
inline Acc<T> source_scale(const Problem<T, I>& p, int64_t k) {
  const I c = p.graph.indices[k];
  const I* indptr = static_cast<const I*>(p.fused.source_indptr);
  const Acc<T> scale = p.fused.source_scale ? static_cast<const Acc<T>*>(p.fused.source_scale)[c]
                                            : 1 / static_cast<Acc<T>>(indptr[c + 1] - indptr[c]);
  return p.rhs.data ? scale * widen(p.rhs_data()[p.graph.edge(k)]) : scale;
}

// Writes one feature of a finished row; `acc` is a sum, a mean, a maximum or a minimum.
template <class T, class I>
inline void write(const Problem<T, I>& p, int64_t row, int64_t d, Acc<T> acc) {
  narrow(epilogue<1, T>(p.fused, splat<1>(acc), row, d, p.num_feats)[0], p.out + row * p.num_feats + d);
}

// Partial result of one piece of a hub row: values, and the winning nonzero of a max or min.
template <class A>
struct Partial {
  A* value;
  int64_t* winner;
};

// Writes the sources and edges of the largest or smallest: nonzeros k0 + won[0 .. count], of neighbouring features from
// `at` on. Not inlined: unrolled in every block below it would be most of the code.
template <class T, class I, class Index>
[[gnu::noinline]] void write_winners(const Problem<T, I>& p, int64_t at, int64_t k0, const Index* won, int64_t count) {
  if (p.arg_lhs)
    for (int64_t i = 0; i < count; ++i) p.arg_lhs[at + i] = p.graph.indices[k0 + won[i]];
  if (p.arg_rhs)
    for (int64_t i = 0; i < count; ++i) p.arg_rhs[at + i] = static_cast<I>(p.graph.edge(k0 + won[i]));
}

// Where `value` beats `best`, it and its index take the place of `best` and `winner`: `beats` below, on vectors.
template <class V, class W>
inline void keep_better(V& best, W& winner, V value, W index, bool max) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64 && sizeof(best[0]) == 4) {  // GCC makes three times the instructions of the below
    const auto a = reinterpret_cast<__m512>(best), b = reinterpret_cast<__m512>(value);
    const __mmask16 number = _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q);
    const __mmask16 wins =
        max ? _mm512_mask_cmp_ps_mask(number, b, a, _CMP_NLE_UQ) : _mm512_mask_cmp_ps_mask(number, b, a, _CMP_NGE_UQ);
    best = reinterpret_cast<V>(_mm512_mask_mov_ps(a, wins, b));
    winner = reinterpret_cast<W>(
        _mm512_mask_mov_epi32(reinterpret_cast<__m512i>(winner), wins, reinterpret_cast<__m512i>(index)));
    return;
  }
#endif
  const W keep = (max ? W(value <= best) : W(value >= best)) | W(best != best);
  best = keep ? best : value;
  winner = keep ? winner : index;
}

template <class A>
bool beats(A candidate, A best, bool max) {  // NaN beats all but NaN; equal values do not
  if (best != best) return false;
  return max ? !(candidate <= best) : !(candidate >= best);
}

}  // namespace
}  // namespace gnnaccel::GNNACCEL_ISA
