// SpMM of any message and features that broadcast.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "broadcast.h"
#include "spmm_problem.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

// The message of nonzero k with a source's row x and an edge's row w, in a block of N features.
template <int N, class T, class I>
Vec<Acc<T>, N> message_of(const Problem<T, I>& p, const Places<N>& lhs, const Places<N>& rhs, const T* x, const T* w,
                          int64_t block) {
  switch (p.message) {
    case Message::copy_lhs:
      return lhs.read(x, block);
    case Message::copy_rhs:
      return rhs.read(w, block);
    case Message::add:
      return lhs.read(x, block) + rhs.read(w, block);
    default:
      return lhs.read(x, block) * rhs.read(w, block);
  }
}

// M blocks, from `first` on, of nonzeros k0 .. k1 (at least one) of a row, or of a piece of it.
template <bool kExtreme, int M, int N, class T, class I>
void broadcast_blocks(const Problem<T, I>& p, const Places<N>& lhs, const Places<N>& rhs, int64_t row, int64_t k0,
                      int64_t k1, int64_t first, const Partial<Acc<T>>* partial) {
  using A = Acc<T>;
  using V = Vec<A, N>;
  using Index = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
  const bool max = p.reduce == Reduce::max, scales = p.fused.scales_sources();
  const A infinity = std::numeric_limits<A>::infinity();
  V acc[M];
  Vec<Index, N> winner[M];  // the first nonzero, unless another beats infinity
  for (int m = 0; m < M; ++m) {
    acc[m] = splat<N>(!kExtreme ? A(0) : max ? -infinity : infinity);
    winner[m] = Vec<Index, N>{};
  }
  for (int64_t k = k0; k < k1; ++k) {
    const T* x =
        p.message != Message::copy_rhs ? p.lhs_data() + static_cast<int64_t>(p.graph.indices[k]) * p.lhs.len : nullptr;
    const T* w = p.message != Message::copy_lhs ? p.rhs_data() + p.graph.edge(k) * p.rhs.len : nullptr;
    const A scale = scales ? source_scale(p, k) : A(1);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const V value = scales ? lhs.read(x, first + m) * scale : message_of(p, lhs, rhs, x, w, first + m);
      if constexpr (kExtreme)
        keep_better(acc[m], winner[m], value, Vec<Index, N>{} + static_cast<Index>(k - k0), max);
      else
        acc[m] += value;
    }
  }
  const int count = static_cast<int>(std::min<int64_t>(N, p.num_feats));
  for (int m = 0; m < M; ++m) {
    const int64_t d = Places<N>::start(first + m, p.num_feats);
    if (p.reduce == Reduce::mean && !partial) acc[m] /= static_cast<A>(k1 - k0);
    if (partial) {
      std::memcpy(partial->value + d, &acc[m], sizeof(A) * count);
    } else if (count == N) {
      store<N>(p.out + row * p.num_feats + d, epilogue<N, T>(p.fused, acc[m], row, d, p.num_feats));
    } else {
      for (int i = 0; i < count; ++i) write(p, row, d + i, acc[m][i]);
    }
    if constexpr (kExtreme) {
      Index won[N];
      std::memcpy(won, &winner[m], sizeof(won));
      if (!partial) write_winners(p, row * p.num_feats + d, k0, won, count);
      for (int i = 0; partial && i < count; ++i) partial->winner[d + i] = k0 + won[i];
    }
  }
}

// All features of one row, or of a piece of it.
template <int N, class T, class I>
void broadcast_row(const Problem<T, I>& p, const Places<N>& lhs, const Places<N>& rhs, int64_t row, int64_t k0,
                   int64_t k1, const Partial<Acc<T>>* partial) {
  const bool extreme = p.reduce == Reduce::max || p.reduce == Reduce::min;
  const int64_t blocks = (p.num_feats + N - 1) / N;
  const auto with = [&](auto extreme) {
    int64_t b = 0;
    for (; b + 4 <= blocks; b += 4) broadcast_blocks<extreme, 4>(p, lhs, rhs, row, k0, k1, b, partial);
    for (; b + 2 <= blocks; b += 2) broadcast_blocks<extreme, 2>(p, lhs, rhs, row, k0, k1, b, partial);
    for (; b < blocks; ++b) broadcast_blocks<extreme, 1>(p, lhs, rhs, row, k0, k1, b, partial);
  };
  extreme ? with(std::true_type{}) : with(std::false_type{});
}

}  // namespace
}  // namespace gnnaccel::GNNACCEL_ISA
