// Softmax of edge scores over each row, and its backward.
//
// A team of threads holds one row: a power of two of lanes of a warp, sized to the mean degree, or a block where rows
// are long throughout. Rows of many more edges than the team has lanes are left to a whole warp, and those of hundreds
// to a block. A thread takes up to four heads of an edge, in one load; neighbours take the next heads, and those that
// have the same heads share the edges and reduce by shuffles, in a fixed order. The maximum starts at a true -inf, and
// exp is the accurate one.
//
// On large graphs the rows for blocks are queued, as they may lie side by side, in pieces, as one of a hundred thousand
// edges would keep a block for milliseconds. A second kernel takes the pieces; those of one row leave its maximum and
// its sum (of an online softmax: Milakov and Gimelshein, 2018), which a third one merges before it writes. In which
// order rows get into the queue decides nothing.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

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

// Puts a row into the queue, by all lanes of a warp.
template <typename T, typename I>
__device__ __forceinline__ void enqueue(const Params<T, I>& p, I begin, I degree) {
  const int lane = threadIdx.x % 32;
  const unsigned pieces = p.pieces_of(degree), first = __shfl_sync(~0u, lane ? 0 : atomicAdd(p.queued, pieces), 0);
  const Piece<I> piece{begin, degree, static_cast<I>(first), 0};
  for (unsigned i = lane; i < pieces; i += 32) p.queue[first + i] = piece;
}

// Blocks of a multiprocessor: what hubs need is not to take registers from short rows.
template <typename T, typename I, int V, bool BACKWARD>
constexpr int blocks_of = sizeof(T) > 4 || sizeof(I) > 4 ? 1
                          : V == 1                       ? 5
                          : BACKWARD && V == 4           ? 3
                                                         : 4;

// LONG: a block takes the long ones of its rows; else they are queued, if there are any.
template <typename T, typename I, int V, bool BACKWARD, bool LONG>
__global__ void __launch_bounds__(Config::threads, blocks_of<T, I, V, BACKWARD>) rows_kernel(const Params<T, I> p) {
  const int lanes = 1 << p.team_log, member = threadIdx.x & (lanes - 1), own = threadIdx.x >> p.team_log;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * (blockDim.x >> p.team_log);
  I begin = 0, degree = 0;
  if (first_row + own < p.num_rows) {
    begin = __ldg(p.indptr + first_row + own);
    degree = __ldg(p.indptr + first_row + own + 1) - begin;
  }
  const bool leads = member == 0, for_block = degree > p.long_row, for_warp = !for_block && degree > p.medium_row;
  auto solve_row = [&](I from, I count, int thread, int team_log) {
    solve<false, BACKWARD, V, Step::whole>(p, Share<I>{from, count, 0, 0, 0}, thread, team_log);
  };
  solve_row(begin, for_warp || for_block ? I{0} : degree, member, p.team_log);
  // f(first nonzero, degree) for each row, by all lanes of the warp that has them.
  auto for_rows = [&](bool wanted, auto f) {
    unsigned rest = __ballot_sync(~0u, leads && wanted);
    while (rest) {
      const int from = __ffs(rest) - 1;
      rest &= rest - 1;
      f(__shfl_sync(~0u, begin, from), __shfl_sync(~0u, degree, from));
    }
  };
  for_rows(for_warp, [&](I from, I count) { solve_row(from, count, static_cast<int>(threadIdx.x % 32), 5); });
  if constexpr (LONG) {
    __shared__ int num_long;
    __shared__ int long_rows[Config::threads];
    if (threadIdx.x == 0) num_long = 0;
    __syncthreads();
    if (leads && for_block) long_rows[atomicAdd(&num_long, 1)] = own;
    __syncthreads();
    for (int i = 0; i < num_long; ++i) {
      const I* const ends = p.indptr + first_row + long_rows[i];
      const I from = __ldg(ends), count = __ldg(ends + 1) - from;
      solve<true, BACKWARD, V, Step::whole>(p, Share<I>{from, count, 0, 0, 0}, threadIdx.x, p.block_log);
    }
  } else if (p.queue) {
    for_rows(for_block, [&](I from, I count) { enqueue(p, from, count); });
  }
}

// A block for each row.
template <typename T, typename I, int V, bool BACKWARD>
__global__ void __launch_bounds__(Config::threads, blocks_of<T, I, V, BACKWARD>) dense_kernel(const Params<T, I> p) {
  const I begin = __ldg(p.indptr + blockIdx.x), degree = __ldg(p.indptr + blockIdx.x + 1) - begin;
  if (p.queue && degree > p.long_row) {
    if (threadIdx.x < 32) enqueue(p, begin, degree);
    return;
  }
  solve<true, BACKWARD, V, Step::whole>(p, Share<I>{begin, degree, 0, 0, 0}, threadIdx.x, p.block_log);
}

// What is in the queue: rows that are not cut and parts of others, or what FINISH can do once there are the parts.
template <typename T, typename I, int V, bool BACKWARD, bool FINISH>
__global__ void __launch_bounds__(Config::threads) queue_kernel(const Params<T, I> p) {
  constexpr int team_log = 8;
  static_assert(1 << team_log == Config::threads, "a block is a team");
  const unsigned queued = *p.queued;
  for (unsigned i = blockIdx.x; i < queued; i += gridDim.x) {
    const Piece<I> at = p.queue[i];
    const unsigned pieces = p.pieces_of(at.degree), first = static_cast<unsigned>(at.first);
    if (pieces == 1) {
      const Share<I> row{at.begin, at.degree, 0, 0, 0};
      if constexpr (!FINISH) solve<true, BACKWARD, V, Step::whole>(p, row, threadIdx.x, team_log);
      continue;
    }
    const int log = p.piece_log_of(at.degree);
    const I before = static_cast<I>(static_cast<int64_t>(i - first) << log), most = I{1} << log;
    const I here = at.degree - before < most ? at.degree - before : most;
    const Share<I> share{static_cast<I>(at.begin + before), here, first, i - first, pieces};
    solve<true, BACKWARD, V, FINISH ? Step::finish : Step::part>(p, share, threadIdx.x, team_log);
  }
}

int log_of(int64_t power) {
  int log = 0;
  while ((int64_t{1} << log) < power) ++log;
  return log;
}

// How the rows of a graph are shared out, with a thread for each of `groups` heads or groups of heads of an edge.
struct Shares {
  int team_log, groups_log, block_log, piece_log;
  int64_t medium_row, long_row, whole_row;
  bool dense;    // a block for each row
  bool is_long;  // blocks have long ones among their rows
  bool cuts;
  int64_t most_pieces;  // 0: no queue

  Shares(const Csr& graph, int64_t num_heads, int64_t groups) {
    const int64_t mean = ceil_div(graph.nnz, graph.num_rows), each = next_power_of_two(groups);
    const int64_t longest = graph.longest ? graph.longest : graph.nnz;
    groups_log = std::min(log_of(each), 5);
    const int64_t piece = std::max(Config::piece / each, Config::least_piece);
    piece_log = log_of(piece);
    dense = next_power_of_two(mean * each) >= Config::dense_row;
    if (dense) {
      long_row = std::min(std::max(next_power_of_two(2 * mean), piece), Config::most_long_row);
    } else {
      const int64_t of_rows = next_power_of_two(graph.nnz / Config::target_rows);
      const int64_t least = std::max(Config::long_row / each, Config::least_long_row);
      long_row = std::min(std::max(of_rows, least), Config::most_long_row);
    }
    whole_row = longest <= Config::whole_pieces * piece ? longest : std::max(piece, long_row);
    const bool is_worth = graph.nnz * num_heads >= Config::queue_values || graph.longest * each >= Config::queue_row;
    const bool queues = longest > long_row && is_worth;
    is_long = longest > long_row && !queues;
    cuts = longest > whole_row;
    most_pieces = queues ? graph.nnz / piece + graph.nnz / long_row : 0;

    team_log = std::min(groups_log + log_of(ceil_div(graph.nnz, graph.num_rows * Config::lane_edges)), 5);
    const auto medium = [&] { return static_cast<int64_t>(Config::longest_run) << (team_log - groups_log); };
    while (team_log < 5 && graph.num_rows << team_log < Config::few_lanes) ++team_log;
    medium_row = team_log < 5 ? medium() : INT64_MAX;
    const int64_t share = next_power_of_two(ceil_div(mean * (int64_t{1} << groups_log), Config::dense_share));
    const int64_t of_dense = std::min<int64_t>(std::max(share, Config::dense_threads), Config::threads);
    block_log = log_of(dense ? of_dense : is_long ? Config::threads : Config::few_threads);
  }
};

template <bool BACKWARD>
cudaError_t launch(Workspace& workspace, const Csr& graph, const void* first, const void* second, void* out,
                   int64_t num_heads, DType dtype, cudaStream_t stream) {
  if (graph.nnz == 0 || num_heads == 0) return cudaSuccess;
  const uintptr_t address =
      reinterpret_cast<uintptr_t>(first) | reinterpret_cast<uintptr_t>(second) | reinterpret_cast<uintptr_t>(out);
  return with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    auto run = [&](auto heads) {
      constexpr int V = decltype(heads)::value;
      const Shares shares(graph, num_heads, num_heads / V);
      // The number of pieces, they, and what they leave.
      const int64_t head_bytes = sizeof(Piece<I>), queue_bytes = shares.most_pieces * head_bytes;
      const int64_t part_bytes = shares.most_pieces * num_heads * 2 * static_cast<int64_t>(sizeof(Acc<T>));
      char* const scratch =
          static_cast<char*>(workspace.take(shares.most_pieces ? head_bytes + queue_bytes + part_bytes : 0));
      Params<T, I> p{};
      p.indptr = static_cast<const I*>(graph.indptr);
      p.edge_ids = static_cast<const I*>(graph.edge_ids);
      p.num_rows = graph.num_rows;
      p.first = static_cast<const T*>(first);
      p.second = static_cast<const T*>(second);
      p.out = static_cast<T*>(out);
      p.num_heads = static_cast<int>(num_heads);
      p.groups = static_cast<int>(num_heads / V);
      p.team_log = shares.team_log;
      p.groups_log = shares.groups_log;
      p.block_log = shares.block_log;
      p.medium_row = shares.medium_row;
      p.long_row = shares.long_row;
      p.whole_row = shares.whole_row;
      p.piece_log = shares.piece_log;
      if (scratch) {
        p.queued = reinterpret_cast<unsigned*>(scratch);
        p.queue = reinterpret_cast<Piece<I>*>(scratch + head_bytes);
        p.parts = reinterpret_cast<Acc<T>*>(scratch + head_bytes + queue_bytes);
        const cudaError_t status = cudaMemsetAsync(p.queued, 0, sizeof(unsigned), stream);
        if (status != cudaSuccess) return status;
      }
      const unsigned threads = 1u << shares.block_log;
      const unsigned blocks = static_cast<unsigned>(ceil_div(graph.num_rows, threads >> shares.team_log));
      if (shares.dense) {
        dense_kernel<T, I, V, BACKWARD><<<static_cast<unsigned>(graph.num_rows), threads, 0, stream>>>(p);
      } else if (shares.is_long) {
        rows_kernel<T, I, V, BACKWARD, true><<<blocks, threads, 0, stream>>>(p);
      } else {
        rows_kernel<T, I, V, BACKWARD, false><<<blocks, threads, 0, stream>>>(p);
      }
      if (scratch) {
        const unsigned workers = static_cast<unsigned>(std::min(shares.most_pieces, Config::queue_blocks));
        queue_kernel<T, I, V, BACKWARD, false><<<workers, Config::threads, 0, stream>>>(p);
        if (shares.cuts) {
          queue_kernel<T, I, V, BACKWARD, true><<<workers, Config::threads, 0, stream>>>(p);
        }
      }
      return cudaGetLastError();
    };
    auto fits = [&](int heads) { return num_heads % heads == 0 && address % (heads * sizeof(T)) == 0; };
    if constexpr (sizeof(T) < 8) {
      if (fits(4)) return run(std::integral_constant<int, 4>{});
    }
    if (fits(2)) return run(std::integral_constant<int, 2>{});
    return run(std::integral_constant<int, 1>{});
  });
}

}  // namespace

cudaError_t edge_softmax(Workspace& workspace, const Csr& graph, const void* scores, void* out, int64_t num_heads,
                         DType dtype, cudaStream_t stream) {
  return launch<false>(workspace, graph, scores, nullptr, out, num_heads, dtype, stream);
}

cudaError_t edge_softmax_backward(Workspace& workspace, const Csr& graph, const void* out, const void* grad_out,
                                  void* grad_scores, int64_t num_heads, DType dtype, cudaStream_t stream) {
  return launch<true>(workspace, graph, out, grad_out, grad_scores, num_heads, dtype, stream);
}

}  // namespace cuda
}  // namespace gnnaccel
