// What a team of threads does with a row of edge scores, or with a piece of one: its softmax, or the gradient of that
// (edge_softmax.cu).
//
// A thread takes up to four heads of an edge, in one load; neighbours take the next heads, and those that have the same
// heads share the edges and reduce by shuffles, in a fixed order. The maximum starts at a true -inf, and exp is the
// accurate one.
#pragma once

#include <cmath>
#include <type_traits>

#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace edge_softmax_impl {

struct Config {
  static constexpr int threads = 256;  // of a block, at most
  static constexpr int warps = threads / 32;
  static constexpr int few_threads = 128;       // of a block none of whose rows is for all of it
  static constexpr int lane_edges = 4;          // of a row of mean degree
  static constexpr int longest_run = 8;         // a row of more edges for each lane of its team is left to a warp
  static constexpr int64_t few_lanes = 262144;  // with fewer than these on the graph teams are larger
  // With one thread for an edge; with more, as many times less. Rows beyond this are for blocks: few enough on a large
  // graph, short enough for a warp on a small one.
  static constexpr int64_t long_row = 256, least_long_row = 64, most_long_row = 4096;
  static constexpr int64_t target_rows = 8192;
  static constexpr int64_t piece = 1024, least_piece = 32;
  static constexpr int64_t whole_pieces = 4;   // as long a row may be and not be cut, if no other is longer
  static constexpr int64_t most_pieces = 512;  // of a row, about
  // From so many scores on, or a row known to have so many loads, long rows are worth the launches of a queue.
  static constexpr int64_t queue_values = 600000, queue_row = 32768;
  static constexpr int64_t queue_blocks = 1024;
  // Rows of so many scores in the mean, in loads, are a block's; and a thread's share of them.
  static constexpr int64_t dense_row = 256, dense_share = 8, dense_threads = 64;
  static_assert(threads % 32 == 0, "whole warps");
};

// Edges of a thread in registers; and of those behind them, how many are on their way at a time.
constexpr int kHeld = 4;
template <int V>
constexpr int in_flight_of = V == 1 ? 4 : 2;

// Piece i of a queue: number i - first of a row.
template <typename I>
struct alignas(4 * sizeof(I)) Piece {
  I begin, degree;  // of the row
  I first;
  I unused;
};

template <typename T, typename I>
struct Params {
  const I* indptr;
  const I* edge_ids;
  int64_t num_rows;
  const T* first;   // forward: scores; backward: the softmax
  const T* second;  // backward: its gradient
  T* out;
  int num_heads;
  int groups;                // of heads, each a thread's
  int team_log, groups_log;  // threads of a row's team, and how many of them take groups of the same edge: powers of 2
  int block_log;             // threads of a block
  int64_t medium_row;        // rows of more are for a warp,
  int64_t long_row;          // of more than this for a block,
  int64_t whole_row;         // and of more than this they are cut
  int piece_log;
  Piece<I>* queue;   // null: a block takes the long ones of its rows
  unsigned* queued;  // how many pieces
  Acc<T>* parts;     // [pieces, num_heads, 2]: maximum and sum

  // Edges of a row's piece, as a power of two: more of longer rows, as each piece reads what all of its row have left.
  __device__ __forceinline__ int piece_log_of(I degree) const {
    int log = piece_log;
    while (degree >> log > Config::most_pieces) ++log;
    return log;
  }
  __device__ __forceinline__ unsigned pieces_of(I degree) const {
    return degree <= whole_row ? 1 : static_cast<unsigned>((degree - 1) >> piece_log_of(degree)) + 1;
  }
};

// Nonzeros of a row for a team, and which piece of a row they are.
template <typename I>
struct Share {
  I begin, count;
  int64_t first_piece, own, pieces;
};

// What a team does with a row: all, or with a piece of it what comes before and after all pieces are known.
enum class Step { whole, part, finish };

struct Max {
  template <typename A>
  __device__ __forceinline__ A operator()(A x, A y) const {
    return x > y ? x : y;  // a NaN score need not win here: its own exp spreads it over the row
  }
};
struct Plus {
  template <typename A>
  __device__ __forceinline__ A operator()(A x, A y) const {
    return x + y;
  }
};

// Reduces each of V values over the threads of a team whose index is equal modulo `groups` (a power of two, at most
// 32).
template <bool BLOCK, int V, typename A, typename Op>
__device__ __forceinline__ void reduce(A (&x)[V], int lanes, int groups, Op op) {
  for (int step = groups; step < (BLOCK ? 32 : lanes); step *= 2) {
#pragma unroll
    for (int v = 0; v < V; ++v) x[v] = op(x[v], __shfl_xor_sync(~0u, x[v], step));
  }
  if constexpr (BLOCK) {
    __shared__ A parts[Config::warps][V][32];
    const int lane = threadIdx.x % 32, own = lane & (groups - 1), warps = lanes / 32;
    if (lane < groups) {
#pragma unroll
      for (int v = 0; v < V; ++v) parts[threadIdx.x / 32][v][lane] = x[v];
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v) {
      x[v] = parts[0][v][own];
      for (int warp = 1; warp < warps; ++warp) x[v] = op(x[v], parts[warp][v][own]);
    }
    __syncthreads();
  }
}

// A team's share, by thread `member` of its 2^team_log. All threads of the team's warps call this together; a team
// without a row passes no nonzeros. A thread's first edges stay in registers, in the forward as exp of them; those
// behind are read, and exp of them computed, as often as they are asked for.
template <bool BLOCK, bool BACKWARD, int V, Step STEP, typename T, typename I>
__device__ __forceinline__ void solve(const Params<T, I>& p, const Share<I>& share, int member, int team_log) {
  using A = Acc<T>;
  constexpr int in_flight = in_flight_of<V>;
  const int groups = 1 << p.groups_log, lanes = 1 << team_log, step = 1 << (team_log - p.groups_log);
  const int place = member >> p.groups_log;
  for (int group = member & (groups - 1), base = 0; base < p.groups; base += groups, group += groups) {
    const I start = share.begin + place;
    const I count = group < p.groups ? share.count - place : I{0};  // from there on: the thread's are every step-th
    const T* const first = p.first + group * V;
    const T* const second = BACKWARD ? p.second + group * V : nullptr;
    const T* const out = p.out + group * V;
    auto edge = [&](I k) { return p.edge_ids ? __ldg(p.edge_ids + start + k) : static_cast<I>(start + k); };
    auto read = [&](const T* from, I id, A(&to)[V]) {
      Pack<T, V> pack;
      load(row_address(from, id, p.num_heads), pack);
#pragma unroll
      for (int v = 0; v < V; ++v) to[v] = widen(pack.values[v]);
    };
    auto write = [&](I id, auto value) {
      Pack<T, V> pack;
#pragma unroll
      for (int v = 0; v < V; ++v) pack.values[v] = narrow<T>(value(v));
      store(const_cast<T*>(row_address(out, id, p.num_heads)), pack);
    };

    I ids[kHeld];
    A one[kHeld][V], two[BACKWARD ? kHeld : 1][V];
    auto for_held = [&](auto f) {
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        if (u * step < count) f(u);
      }
    };
    auto for_rest = [&](auto f) {
#pragma unroll in_flight
      for (I k = kHeld * step; k < count; k += step) {
        A x[V], y[V];
        const I id = edge(k);
        read(first, id, x);
        if constexpr (BACKWARD) read(second, id, y);
        f(id, x, y);
      }
    };
    for_held([&](int u) { ids[u] = edge(u * step); });
    for_held([&](int u) {
      read(first, ids[u], one[u]);
      if constexpr (BACKWARD) read(second, ids[u], two[u]);
    });

    A top[V], few[V] = {};
#pragma unroll
    for (int v = 0; v < V; ++v) top[v] = -INFINITY;
    // Behind its first edges a thread of a hub's block may add up thousands of terms, of which f32 would lose digits.
    std::conditional_t<BLOCK, double, A> sum[V] = {};
    auto add_few = [&] {
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] = few[v];
    };
    if constexpr (STEP == Step::finish) {
      auto for_parts = [&](auto f) {
        for (int64_t i = place; group < p.groups && i < share.pieces; i += step) {
#pragma unroll
          for (int v = 0; v < V; ++v) f(v, p.parts + ((share.first_piece + i) * p.num_heads + group * V + v) * 2);
        }
      };
      if constexpr (BACKWARD) {
        for_parts([&](int v, const A* part) { sum[v] += part[1]; });
      } else {
        for_parts([&](int v, const A* part) { top[v] = Max{}(part[0], top[v]); });
        reduce<BLOCK>(top, lanes, groups, Max{});
        for_parts([&](int v, const A* part) { sum[v] += part[1] * exp(part[0] - top[v]); });
        for_held([&](int u) {
#pragma unroll
          for (int v = 0; v < V; ++v) one[u][v] = exp(one[u][v] - top[v]);
        });
      }
    } else if constexpr (BACKWARD) {
      for_held([&](int u) {
#pragma unroll
        for (int v = 0; v < V; ++v) few[v] += one[u][v] * two[u][v];
      });
      add_few();
      for_rest([&](I, const A(&softmax)[V], const A(&grad)[V]) {
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += softmax[v] * grad[v];
      });
    } else {
      for_held([&](int u) {
#pragma unroll
        for (int v = 0; v < V; ++v) top[v] = Max{}(one[u][v], top[v]);
      });
      for_rest([&](I, const A(&score)[V], const A(&)[V]) {
#pragma unroll
        for (int v = 0; v < V; ++v) top[v] = Max{}(score[v], top[v]);
      });
      reduce<BLOCK>(top, lanes, groups, Max{});
      A least[V];
#pragma unroll
      for (int v = 0; v < V; ++v) {
        // Relative to 0 where all of a piece are -inf, which is nothing beside others of the row, and 0 / 0 alone.
        least[v] = STEP == Step::part && top[v] == -INFINITY ? A(0) : top[v];
      }
      for_held([&](int u) {
#pragma unroll
        for (int v = 0; v < V; ++v) few[v] += one[u][v] = exp(one[u][v] - least[v]);
      });
      add_few();
      for_rest([&](I, const A(&score)[V], const A(&)[V]) {
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += exp(score[v] - least[v]);
      });
    }
    reduce<BLOCK>(sum, lanes, groups, Plus{});

    if constexpr (STEP == Step::part) {
      if (place || group >= p.groups) continue;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        A* const part = p.parts + ((share.first_piece + share.own) * p.num_heads + group * V + v) * 2;
        if constexpr (!BACKWARD) part[0] = top[v];
        part[1] = static_cast<A>(sum[v]);
      }
    } else {
      A total[V];  // of the forward its inverse: at least one term of the sum is 1
#pragma unroll
      for (int v = 0; v < V; ++v) total[v] = static_cast<A>(BACKWARD ? sum[v] : 1 / sum[v]);
      for_held([&](int u) {
        write(ids[u], [&](int v) {
          return BACKWARD ? one[u][v] * (two[BACKWARD ? u : 0][v] - total[v]) : one[u][v] * total[v];
        });
      });
      for_rest([&](I id, const A(&x)[V], const A(&y)[V]) {
        write(id, [&](int v) {
          return BACKWARD ? x[v] * (y[v] - total[v]) : static_cast<A>(exp(x[v] - top[v])) * total[v];
        });
      });
    }
  }
}

}  // namespace edge_softmax_impl
}  // namespace cuda
}  // namespace gnnaccel
