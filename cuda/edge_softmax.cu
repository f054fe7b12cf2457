// Softmax of edge scores over each row, and its backward (edge_softmax.cuh): how rows are shared out.
//
// A team of threads holds one row: a power of two of lanes of a warp, sized to the mean degree, or a block where rows
// are long throughout. Rows of many more edges than the team has lanes are left to a whole warp, and those of hundreds
// to a block.
//
// On large graphs the rows for blocks are queued, as they may lie side by side, in pieces, as one of a hundred thousand
// edges would keep a block for milliseconds. A second kernel takes the pieces; those of one row leave its maximum and
// its sum (of an online softmax: Milakov and Gimelshein, 2018), which a third one merges before it writes. In which
// order rows get into the queue decides nothing.
#include <algorithm>

#include "edge_softmax.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

using namespace edge_softmax_impl;

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
