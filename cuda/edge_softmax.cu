// Softmax of edge scores over each row, and its backward.
//
// A team of threads holds one row: a power of two of lanes of a warp for short rows, sized to the mean degree, and a
// whole block for longer ones. A thread takes up to four heads of an edge, in one load; neighbours take the next heads,
// and those that have the same heads share the edges and reduce by shuffles, in a fixed order. The maximum starts at a
// true -inf, and exp is the accurate one.
//
// On large graphs rows much longer than a block should take are cut, as one of a hundred thousand edges would keep it
// for milliseconds: each piece leaves its maximum and its sum (those of an online softmax: Milakov and Gimelshein,
// 2018), and a second kernel merges what the pieces of its row left before it writes.
#include <cmath>
#include <type_traits>

#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 256;
  static constexpr int held = 4;        // edges of a thread in registers, with one head; half with more
  static constexpr int lane_edges = 2;  // of a short row of mean degree
  // Rows beyond this take a block: few enough on a large graph, short enough for a warp on a small one.
  static constexpr int64_t min_long_row = 256;
  static constexpr int64_t max_long_row = 4096;
  static constexpr int64_t target_rows = 8192;
  // Of so many scores rows of more than `cut_pieces` pieces are worth a second launch.
  static constexpr int64_t cut_values = 600000;
  static constexpr int64_t cut_pieces = 4;
  static constexpr int64_t piece = 1024;
  static_assert(threads % 32 == 0, "whole warps");
};

template <typename T, typename I>
struct Params {
  const I* indptr;
  const I* edge_ids;
  int64_t num_rows;
  int64_t nnz;
  const T* first;   // forward: scores; backward: the softmax
  const T* second;  // backward: its gradient
  T* out;
  int64_t num_heads;
  int64_t groups;    // of heads, each a thread's
  int64_t long_row;  // rows of more take a block ...
  int64_t cut_row;   // ... and of more than this are cut at multiples of `piece`
  int64_t piece;
  unsigned cut_blocks, long_blocks;
  int lanes;      // of a short row's team
  Acc<T>* parts;  // [2 * multiples of piece, num_heads, 2]: maximum and sum of what a row has between two of them,
                  // of the one begun before and of the one begun there; null: rows are not cut

  // A row's nonzeros between c * piece and the next multiple.
  __device__ __forceinline__ Acc<T>* part(int64_t c, int64_t row_begin, int64_t head) const {
    return parts + ((2 * c + (row_begin > c * piece)) * num_heads + head) * 2;
  }
};

// What a block does with a row: all, or with a piece of it what comes before and after all pieces are known.
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

// Reduces over the threads of a team whose index is equal modulo `groups` (a power of two, at most 32).
template <bool BLOCK, typename A, typename Op>
__device__ __forceinline__ A reduce(A x, int lanes, int groups, Op op) {
  for (int step = groups; step < (BLOCK ? 32 : lanes); step *= 2) x = op(x, __shfl_xor_sync(~0u, x, step));
  if constexpr (BLOCK) {
    constexpr int warps = Config::threads / 32;
    __shared__ A parts[warps][32];
    const int lane = threadIdx.x % 32;
    parts[threadIdx.x / 32][lane] = x;
    __syncthreads();
    x = parts[0][lane];
    for (int warp = 1; warp < warps; ++warp) x = op(x, parts[warp][lane]);
    __syncthreads();
  }
  return x;
}

// Nonzeros begin .. end - 1 of one row, or of its piece, by thread `member` of its team. All threads of the team's
// warps call this together; a team without a row passes begin == end. A thread's first values stay in registers; those
// of longer rows are read, and exp of them computed, as often as they are asked for.
template <bool BLOCK, bool BACKWARD, int V, Step STEP, typename T, typename I>
__device__ __forceinline__ void solve_row(const Params<T, I>& p, int64_t begin, int64_t end, int member, int lanes,
                                          int groups, int64_t row_begin, int64_t row_end) {
  using A = Acc<T>;
  constexpr int held = V == 1 ? Config::held : Config::held / 2;
  const int step = lanes / groups;
  for (int64_t base = 0; base < p.groups; base += groups) {
    const int64_t group = base + member % groups;
    const int64_t start = group < p.groups ? begin + member / groups : end, rest = start + held * step;
    auto at = [&](int64_t k) {
      return (p.edge_ids ? static_cast<int64_t>(__ldg(p.edge_ids + k)) : k) * p.num_heads + group * V;
    };
    int64_t place[held];
    Pack<T, V> first[held], second[held];
#pragma unroll
    for (int u = 0; u < held; ++u) place[u] = start + u * step < end ? at(start + u * step) : -1;
#pragma unroll
    for (int u = 0; u < held; ++u) {
      if (place[u] < 0) continue;
      load(p.first + place[u], first[u]);
      if (BACKWARD) load(p.second + place[u], second[u]);
    }
    // f(values of an edge, of two tensors) for all edges of the thread.
    auto for_edges = [&](auto f) {
#pragma unroll
      for (int u = 0; u < held; ++u) {
        if (place[u] >= 0) f(first[u], second[u], place[u]);
      }
#pragma unroll 4
      for (int64_t k = rest; k < end; k += step) {
        Pack<T, V> one, two;
        const int64_t i = at(k);
        load(p.first + i, one);
        if (BACKWARD) load(p.second + i, two);
        f(one, two, i);
      }
    };
    A top[V];
    // A thread of a hub's block adds up thousands of terms, of which f32 would lose digits.
    std::conditional_t<BLOCK, double, A> sum[V] = {};
    if constexpr (STEP == Step::finish) {
      const int64_t last = group < p.groups ? (row_end - 1) / p.piece + 1 : 0;
      auto for_parts = [&](auto f) {
        for (int64_t c = row_begin / p.piece + member / groups; c < last; c += step) {
#pragma unroll
          for (int v = 0; v < V; ++v) f(v, p.part(c, row_begin, group * V + v));
        }
      };
      if constexpr (BACKWARD) {
        for_parts([&](int v, const A* part) { sum[v] += part[1]; });
      } else {
#pragma unroll
        for (int v = 0; v < V; ++v) top[v] = -INFINITY;
        for_parts([&](int v, const A* part) { top[v] = Max{}(part[0], top[v]); });
#pragma unroll
        for (int v = 0; v < V; ++v) top[v] = reduce<BLOCK>(top[v], lanes, groups, Max{});
        for_parts([&](int v, const A* part) { sum[v] += part[1] * exp(part[0] - top[v]); });
      }
    } else if constexpr (BACKWARD) {
      for_edges([&](const Pack<T, V>& softmax, const Pack<T, V>& grad, int64_t) {
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += widen(softmax.values[v]) * widen(grad.values[v]);
      });
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) top[v] = -INFINITY;
      for_edges([&](const Pack<T, V>& score, const Pack<T, V>&, int64_t) {
#pragma unroll
        for (int v = 0; v < V; ++v) top[v] = Max{}(widen(score.values[v]), top[v]);
      });
#pragma unroll
      for (int v = 0; v < V; ++v) top[v] = reduce<BLOCK>(top[v], lanes, groups, Max{});
      for_edges([&](const Pack<T, V>& score, const Pack<T, V>&, int64_t) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          // Relative to 0 where all of a piece are -inf, which is nothing beside others of the row, and 0 / 0 alone.
          const A base = STEP == Step::part && top[v] == -INFINITY ? A(0) : top[v];
          sum[v] += exp(widen(score.values[v]) - base);
        }
      });
    }
#pragma unroll
    for (int v = 0; v < V; ++v) sum[v] = reduce<BLOCK>(sum[v], lanes, groups, Plus{});
    if constexpr (STEP == Step::part) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (member / groups || group >= p.groups) continue;
        A* const part = p.part(begin / p.piece, row_begin, group * V + v);
        if constexpr (!BACKWARD) part[0] = top[v];
        part[1] = static_cast<A>(sum[v]);
      }
      continue;
    }
    for_edges([&](const Pack<T, V>& one, const Pack<T, V>& two, int64_t i) {
      Pack<T, V> out;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const A value = widen(one.values[v]);
        const A total = static_cast<A>(sum[v]);
        out.values[v] = narrow<T>(BACKWARD ? value * (widen(two.values[v]) - total) : exp(value - top[v]) / total);
      }
      store(p.out + i, out);
    });
  }
}

__host__ __device__ inline int groups_of_team(int64_t groups) {
  int count = 1;
  while (count < groups && count < 32) count *= 2;
  return count;
}

// The pieces of long rows in the block's share of the multiples of `piece`: between a multiple and the next one there
// may be the end of one, or some of its middle, and the beginning of another. Each of the block's warps looks at one,
// far from those of the others, so that the pieces of a row go to different blocks.
template <bool BACKWARD, int V, Step STEP, typename T, typename I>
__device__ __forceinline__ void solve_pieces(const Params<T, I>& p, int groups) {
  constexpr int warps = Config::threads / 32;
  __shared__ int64_t rows[2 * warps];
  const int warp = threadIdx.x / 32;
  auto multiple = [&](int w) { return blockIdx.x + static_cast<int64_t>(w) * p.cut_blocks; };
  auto low = [&](int64_t c) { return c * p.piece; };
  auto high = [&](int64_t c) { return low(c + 1) < p.nnz ? low(c + 1) : p.nnz; };
  for (int side = 0; side < 2; ++side) {
    const int64_t c = multiple(warp);
    const bool there = low(c) < p.nnz;
    const int64_t k = !there ? 0 : side ? high(c) - 1 : low(c);
    const int64_t row = find_row_by_group<32>(p.indptr, p.num_rows, static_cast<I>(k));
    const int64_t begin = p.indptr[row], end = p.indptr[row + 1];
    const bool is_long = there && end - begin > p.cut_row && (begin > low(c)) == (side == 1);
    if (threadIdx.x % 32 == 0) rows[2 * warp + side] = is_long ? row : -1;
  }
  __syncthreads();
  for (int i = 0; i < 2 * warps; ++i) {
    if (rows[i] < 0) continue;
    const int64_t row_begin = p.indptr[rows[i]], row_end = p.indptr[rows[i] + 1], c = multiple(i / 2);
    const int64_t begin = row_begin > low(c) ? row_begin : low(c), end = row_end < high(c) ? row_end : high(c);
    solve_row<true, BACKWARD, V, STEP>(p, begin, end, threadIdx.x, Config::threads, groups, row_begin, row_end);
  }
}

// The first blocks take pieces. The next ones look for other long rows: one longer than long_row holds a multiple of
// long_row, and the block that looks at the first such one takes the row. The other blocks take short rows.
// Blocks of a multiprocessor in the forward: what pieces and hubs need is not to take registers from short rows.
template <typename T, typename I, int V, bool BACKWARD>
constexpr int blocks_of = BACKWARD || sizeof(T) > 4 || sizeof(I) > 4 ? 1
                          : V == 1                                   ? 5
                                                                     : 4;

template <typename T, typename I, int V, bool BACKWARD>
__global__ void __launch_bounds__(Config::threads, blocks_of<T, I, V, BACKWARD>) rows_kernel(const Params<T, I> p) {
  constexpr int warps = Config::threads / 32;
  const int groups = groups_of_team(p.groups);
  if (blockIdx.x < p.cut_blocks) {
    solve_pieces<BACKWARD, V, Step::part>(p, groups);
    return;
  }
  const unsigned block = blockIdx.x - p.cut_blocks;
  if (block >= p.long_blocks) {
    const int64_t team = static_cast<int64_t>(block - p.long_blocks) * (Config::threads / p.lanes);
    const int64_t row = team + threadIdx.x / p.lanes;
    int64_t begin = 0, end = 0;
    if (row < p.num_rows) {
      begin = p.indptr[row];
      end = p.indptr[row + 1];
      if (end - begin > p.long_row) end = begin;
    }
    solve_row<false, BACKWARD, V, Step::whole>(p, begin, end, threadIdx.x % p.lanes, p.lanes, groups, begin, end);
    return;
  }
  __shared__ int64_t rows[warps];
  const int warp = threadIdx.x / 32;
  const int64_t k = (static_cast<int64_t>(block) * warps + warp) * p.long_row;
  const int64_t row = find_row_by_group<32>(p.indptr, p.num_rows, static_cast<I>(k < p.nnz ? k : 0));
  const int64_t begin = p.indptr[row], end = p.indptr[row + 1];
  if (threadIdx.x % 32 == 0) {
    const bool is_long = end - begin > p.long_row && end - begin <= p.cut_row;
    rows[warp] = k < p.nnz && is_long && k - begin < p.long_row ? row : -1;
  }
  __syncthreads();
  for (int i = 0; i < warps; ++i) {
    if (rows[i] < 0) continue;
    const int64_t first = p.indptr[rows[i]], last = p.indptr[rows[i] + 1];
    solve_row<true, BACKWARD, V, Step::whole>(p, first, last, threadIdx.x, Config::threads, groups, first, last);
  }
}

template <typename T, typename I, int V, bool BACKWARD>
__global__ void __launch_bounds__(Config::threads) finish_kernel(const Params<T, I> p) {
  solve_pieces<BACKWARD, V, Step::finish>(p, groups_of_team(p.groups));
}

template <bool BACKWARD>
cudaError_t launch(Workspace& workspace, const Csr& graph, const void* first, const void* second, void* out,
                   int64_t num_heads, DType dtype, cudaStream_t stream) {
  if (graph.nnz == 0 || num_heads == 0) return cudaSuccess;
  int64_t long_row = next_power_of_two(graph.nnz / Config::target_rows);
  if (long_row < Config::min_long_row) long_row = Config::min_long_row;
  if (long_row > Config::max_long_row) long_row = Config::max_long_row;
  const bool cuts = graph.nnz * num_heads >= Config::cut_values;
  const int64_t piece = long_row < Config::piece ? Config::piece : long_row;
  const int64_t pieces = cuts ? ceil_div(graph.nnz, piece) : 0;
  const int64_t parts = 2 * pieces * num_heads * 2;
  void* const scratch = workspace.take(parts * accumulator_size(dtype));
  const uintptr_t address =
      reinterpret_cast<uintptr_t>(first) | reinterpret_cast<uintptr_t>(second) | reinterpret_cast<uintptr_t>(out);
  return with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    auto run = [&](auto heads) {
      constexpr int V = decltype(heads)::value;
      Params<T, I> p{};
      p.indptr = static_cast<const I*>(graph.indptr);
      p.edge_ids = static_cast<const I*>(graph.edge_ids);
      p.num_rows = graph.num_rows;
      p.nnz = graph.nnz;
      p.first = static_cast<const T*>(first);
      p.second = static_cast<const T*>(second);
      p.out = static_cast<T*>(out);
      p.num_heads = num_heads;
      p.groups = num_heads / V;
      const int64_t of_group = next_power_of_two(ceil_div(graph.nnz, graph.num_rows * Config::lane_edges));
      const int64_t lanes = of_group * groups_of_team(p.groups);
      p.lanes = static_cast<int>(lanes < 32 ? lanes : 32);
      p.long_row = long_row;
      p.piece = piece;
      p.cut_row = cuts ? Config::cut_pieces * piece : INT64_MAX;
      p.cut_blocks = static_cast<unsigned>(ceil_div(pieces, Config::threads / 32));
      p.parts = static_cast<Acc<T>*>(scratch);
      if (graph.nnz > p.long_row) {
        p.long_blocks = static_cast<unsigned>(ceil_div(graph.nnz, p.long_row * (Config::threads / 32)));
      }
      const unsigned blocks = static_cast<unsigned>(ceil_div(graph.num_rows, Config::threads / p.lanes));
      rows_kernel<T, I, V, BACKWARD><<<p.cut_blocks + p.long_blocks + blocks, Config::threads, 0, stream>>>(p);
      if (cuts) {
        finish_kernel<T, I, V, BACKWARD><<<p.cut_blocks, Config::threads, 0, stream>>>(p);
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
