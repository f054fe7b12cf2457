// SDDMM on the CPU: nonzeros split evenly over the tasks (one hub is many tasks), the destination's row hot
// in L1 while the source rows stream past, the one eight edges ahead prefetched.
#include <algorithm>
#include <numeric>
#include <type_traits>

#include "broadcast.h"
#include "isa.h"
#include "rows.h"
#include "simd.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

template <class T, class I>
struct Problem {
  CsrOf<I> graph;
  Operand lhs, rhs;
  Target lhs_target, rhs_target;
  T* out;
  int64_t num_feats, dot_len;
  EdgeOp op;

  static const T* row(const Operand& x, Target target, int64_t u, int64_t v, int64_t e) {
    const int64_t at = target == Target::u ? u : target == Target::v ? v : e;
    return static_cast<const T*>(x.data) + at * x.len;
  }
};

template <class T>
[[gnu::always_inline]] inline void prefetch_row(const Operand& x, Target target, int64_t u, int64_t e) {
  if (target == Target::v || x.data == nullptr) return;
  const char* row = static_cast<const char*>(x.data) + (target == Target::u ? u : e) * x.len * sizeof(T);
  const int64_t bytes = std::min<int64_t>(x.len * sizeof(T), 512);
  for (int64_t b = 0; b < bytes; b += 64) prefetch<1>(row + b);
}

// body(row, k0, k1) for pieces of rows, each task getting an equal share of the nonzeros.
template <class T, class I, class Body>
void for_pieces(const Problem<T, I>& p, int threads, const Body& body) {
  const auto& g = p.graph;
  const int64_t tasks = threads <= 1 ? 1 : threads * int64_t{8};
  parallel_for(tasks, threads, [&](int64_t t) {
    const int64_t begin = g.nnz * t / tasks, end = g.nnz * (t + 1) / tasks;
    if (begin == end) return;
    int64_t v = row_of(g, begin);
    for (int64_t k = begin; k < end; ++v) {
      const int64_t stop = std::min<int64_t>(end, g.indptr[v + 1]);
      if (k < stop) body(v, k, stop);
      k = stop;
    }
  });
}

// body(lhs row, rhs row, out row) for every nonzero.
template <class T, class I, class Body>
void for_edges(const Problem<T, I>& p, int threads, const Body& body) {
  const auto& g = p.graph;
  const bool reads_u = g.indices && (p.lhs_target == Target::u || p.rhs_target == Target::u);
  const bool ahead = reads_u || g.edge_ids;
  for_pieces(p, threads, [&](int64_t v, int64_t k0, int64_t k1) {
    for (int64_t k = k0; k < k1; ++k) {
      if (ahead && k + kPrefetchAhead < g.nnz) {
        const int64_t next_u = reads_u ? g.indices[k + kPrefetchAhead] : 0;
        const int64_t next_e = g.edge(k + kPrefetchAhead);
        prefetch_row<T>(p.lhs, p.lhs_target, next_u, next_e);
        prefetch_row<T>(p.rhs, p.rhs_target, next_u, next_e);
        if (g.edge_ids) __builtin_prefetch(p.out + next_e * p.num_feats, 1);
      }
      const int64_t u = reads_u ? g.indices[k] : 0, e = g.edge(k);
      body(p.row(p.lhs, p.lhs_target, u, v, e), p.row(p.rhs, p.rhs_target, u, v, e), p.out + e * p.num_feats);
    }
  });
}

// Dots of a source's and a destination's row of M vectors, P vectors to a head: the usual case. The
// destination's row stays in registers while its sources stream past.
template <int N, int M, int P, class T, class I>
void resident_dots(const Problem<T, I>& p, int threads) {
  using V = Vec<Acc<T>, N>;
  const auto& g = p.graph;
  constexpr int64_t kWidth = N * M;
  const bool lhs_is_u = p.lhs_target == Target::u;
  const auto* sources = static_cast<const T*>(lhs_is_u ? p.lhs.data : p.rhs.data);
  const auto* rows = static_cast<const T*>(lhs_is_u ? p.rhs.data : p.lhs.data);
  for_pieces(p, threads, [&](int64_t v, int64_t k0, int64_t k1) {
    V row[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) row[m] = load<N>(rows + v * kWidth + m * N);
    for (int64_t k = k0; k < k1; ++k) {
      if (k + kPrefetchAhead < g.nnz) {
        prefetch<kWidth * sizeof(T)>(sources + static_cast<int64_t>(g.indices[k + kPrefetchAhead]) * kWidth);
        if (g.edge_ids) __builtin_prefetch(p.out + static_cast<int64_t>(g.edge_ids[k + kPrefetchAhead]) * (M / P), 1);
      }
      const T* x = sources + static_cast<int64_t>(g.indices[k]) * kWidth;
      T* out = p.out + g.edge(k) * (M / P);
#pragma GCC unroll 8
      for (int h = 0; h < M / P; ++h) {
        V sum = row[h * P] * load<N>(x + h * P * N);
#pragma GCC unroll 8
        for (int m = h * P + 1; m < (h + 1) * P; ++m) sum += row[m] * load<N>(x + m * N);
        narrow(horizontal_sum<Acc<T>, N>(sum), out + h);
      }
    }
  });
}

template <int N, int M, int P, class T, class I>
bool try_resident_dots(const Problem<T, I>& p, int threads) {
  if (p.num_feats * p.dot_len == N * M && p.dot_len == N * P) {
    resident_dots<N, M, P>(p, threads);
    return true;
  }
  if constexpr (P > 1)
    return try_resident_dots<N, M, P / 2>(p, threads);
  else if constexpr (M > 1)
    return try_resident_dots<N, M / 2, M / 2>(p, threads);
  else
    return false;
}

template <int N, class T>
inline Acc<T> dot(const T* a, const T* b, int64_t n) {
  using V = Vec<Acc<T>, N>;
  V sum0{}, sum1{};
  int64_t i = 0;
  for (; i + 2 * N <= n; i += 2 * N) {
    sum0 += load<N>(a + i) * load<N>(b + i);
    sum1 += load<N>(a + i + N) * load<N>(b + i + N);
  }
  if (i + N <= n) {
    sum0 += load<N>(a + i) * load<N>(b + i);
    i += N;
  }
  Acc<T> out = horizontal_sum<Acc<T>, N>(sum0 + sum1);
  for (; i < n; ++i) out += widen(a[i]) * widen(b[i]);
  return out;
}

template <EdgeOp op, class V>
inline V combine(V a, V b) {
  if constexpr (op == EdgeOp::copy_lhs)
    return a;
  else if constexpr (op == EdgeOp::copy_rhs)
    return b;
  else if constexpr (op == EdgeOp::add)
    return a + b;
  else if constexpr (op == EdgeOp::sub)
    return a - b;
  else if constexpr (op == EdgeOp::div)
    return a / b;
  else
    return a * b;
}

template <EdgeOp op, class T, class I>
void elementwise(const Problem<T, I>& p, int threads) {
  constexpr int N = kLanes<T>;
  constexpr bool reads_lhs = op != EdgeOp::copy_rhs, reads_rhs = op != EdgeOp::copy_lhs;
  const int64_t feats = p.num_feats;
  const bool full = (!reads_lhs || p.lhs.len == feats) && (!reads_rhs || p.rhs.len == feats);
  if (full) {
    for_edges(p, threads, [feats](const T* a, const T* b, T* out) {
      int64_t d = 0;
      for (; d + N <= feats; d += N)
        store<N>(out + d, combine<op>(load<N>(reads_lhs ? a + d : b + d), load<N>(reads_rhs ? b + d : a + d)));
      for (; d < feats; ++d)
        narrow(combine<op>(widen(reads_lhs ? a[d] : b[d]), widen(reads_rhs ? b[d] : a[d])), out + d);
    });
    return;
  }
  with_lanes<T>(std::gcd(unbroken(p.lhs, feats), unbroken(p.rhs, feats)), feats, [&](auto lanes) {
    const Places<lanes> lhs(p.lhs, feats), rhs(p.rhs, feats);
    const int64_t blocks = (feats + lanes - 1) / lanes;
    for_edges(p, threads, [&, feats, blocks](const T* a, const T* b, T* out) {
      for (int64_t i = 0; i < blocks; ++i) {
        const auto value =
            combine<op>(reads_lhs ? lhs.read(a, i) : rhs.read(b, i), reads_rhs ? rhs.read(b, i) : lhs.read(a, i));
        T* to = out + lhs.start(i, feats);
        if (feats >= lanes)
          store<lanes>(to, value);
        else
          for (int64_t d = 0; d < feats; ++d) narrow(value[d], to + d);
      }
    });
  });
}

template <class T, class I>
void dots(const Problem<T, I>& p, int threads) {
  const int64_t heads = p.num_feats, n = p.dot_len, width = heads * n;
  const bool ends = (p.lhs_target == Target::u && p.rhs_target == Target::v) ||
                    (p.lhs_target == Target::v && p.rhs_target == Target::u);
  if (p.lhs.len == width && p.rhs.len == width) {
    if (ends && try_resident_dots<kLanes<T>, 8, 8>(p, threads)) return;
    if constexpr (kLanes<T> > 8)
      if (ends && try_resident_dots<8, 8, 8>(p, threads)) return;
    const auto with = [&](auto lanes) {
      for_edges(p, threads, [heads, n](const T* a, const T* b, T* out) {
        for (int64_t h = 0; h < heads; ++h) narrow(dot<decltype(lanes)::value>(a + h * n, b + h * n, n), out + h);
      });
    };
    if (n >= kLanes<T>) return with(std::integral_constant<int, kLanes<T>>{});
    return with(std::integral_constant<int, 4>{});
  }
  const int64_t whole = std::gcd(std::gcd(unbroken(p.lhs, width), unbroken(p.rhs, width)), n);
  with_lanes<T>(whole, n, [&](auto lanes) {
    if (n % lanes == 0) {
      const Places<lanes> lhs(p.lhs, width), rhs(p.rhs, width);
      for_edges(p, threads, [&, heads, blocks = n / lanes](const T* a, const T* b, T* out) {
        for (int64_t h = 0, i = 0; h < heads; ++h) {
          Vec<Acc<T>, lanes> sum{};
          for (int64_t end = i + blocks; i < end; ++i) sum += lhs.read(a, i) * rhs.read(b, i);
          narrow(horizontal_sum<Acc<T>, lanes>(sum), out + h);
        }
      });
      return;
    }
    const Places<1> lhs(p.lhs, width), rhs(p.rhs, width);
    for_edges(p, threads, [&, heads, n](const T* a, const T* b, T* out) {
      for (int64_t h = 0, i = 0; h < heads; ++h) {
        Acc<T> sum = 0;
        for (int64_t end = i + n; i < end; ++i) sum += (lhs.read(a, i) * rhs.read(b, i))[0];
        narrow(sum, out + h);
      }
    });
  });
}

template <class T, class I>
void run(const SddmmArgs& a) {
  const Problem<T, I> p{CsrOf<I>(a.graph),      a.lhs,       a.rhs,     a.lhs_target, a.rhs_target,
                        static_cast<T*>(a.out), a.num_feats, a.dot_len, a.op};
  const int threads = useful_threads(a.graph.nnz * a.num_feats * a.dot_len, a.threads);
  switch (a.op) {
    case EdgeOp::copy_lhs:
      return elementwise<EdgeOp::copy_lhs>(p, threads);
    case EdgeOp::copy_rhs:
      return elementwise<EdgeOp::copy_rhs>(p, threads);
    case EdgeOp::add:
      return elementwise<EdgeOp::add>(p, threads);
    case EdgeOp::sub:
      return elementwise<EdgeOp::sub>(p, threads);
    case EdgeOp::mul:
      return elementwise<EdgeOp::mul>(p, threads);
    case EdgeOp::div:
      return elementwise<EdgeOp::div>(p, threads);
    case EdgeOp::dot:
      return a.dot_len == 1 ? elementwise<EdgeOp::mul>(p, threads) : dots(p, threads);
  }
}

}  // namespace

void sddmm(const SddmmArgs& a) {
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
