// Attention by inner products along the rows of a graph: forward one pass, backward one over the rows, for the gradient
// of the queries, and one over the transposed rows, for those of keys and values. Nothing is stored per edge, unless
// the last is asked for the gradients of the scores.
//
// All three walk the nonzeros of a row with two vectors of the row's own at hand, gather two of each nonzero's other
// end, and sum up what they gathered. A worker is a group of 2 to 32 lanes with one or two vectors of 16 bytes each,
// which takes one head of one row, or of one piece of a long one; the workers of a row's heads are neighbours, so that
// together they gather whole rows. Inner products are summed by shuffles to every lane, and every lane then computes
// the same weights. Rows are handed out by rows.cuh, the forward's softmax is online (softmax.cuh), and pieces.cuh
// merges the pieces of long rows.
//
// Formulas: ../cpp/dot_attention.cpp.
#pragma once

#include "pieces.cuh"
#include "softmax.cuh"

namespace gnnaccel {
namespace cuda {
namespace dot_attention_impl {

using Mode = DotAttention::Mode;

struct Config {
  // This and the blocks on a multiprocessor, which set the registers: the best of 13 combinations on five cases, H200.
  // Twice the vectors in flight, in fewer blocks, took 1.0 to 1.4 times as long.
  static constexpr int threads = 256;
  static constexpr int batch = 2;  // vectors of a lane in flight, of each of the two that are gathered
  static constexpr int max_vectors = 64;
};

template <typename T, typename I>
struct Params {
  using A = Acc<T>;
  Rows<I> rows;
  const I* indices;
  const I* edge_ids;
  const T* first;   // [columns, width]: keys; over columns: queries
  const T* second;  // [columns, width]: values; over columns: the gradient of the result
  const T* own_first;
  const T* own_second;  // [rows, width]: what is multiplied with these; the forward has no second
  const T* edge_bias;   // [nnz, heads], or null
  EdgeFactors<T> factor;
  const A* ends;    // [destinations, heads, 4], backward: maximum, one over the sum, delta
  T* sum_first;     // [rows, width]: the gradient of queries; over columns: of keys
  T* sum_second;    // the result of the forward; over columns: the gradient of values
  T* grad_scores;   // [nnz, heads] or null, over columns: of the bias; without one, of the inner products
  A* stats_out;     // [rows, heads, 2], forward: maximum, one over the sum
  A* pieces_first;  // [parts, width], in the workspace
  A* pieces_second;
  A* piece_stats;  // [parts, heads, 2], forward: maximum, sum
  A scale;
  int heads;
  int per_head;
  int64_t width;
};

// Sums over all L lanes of a group, the same in each.
template <int L, typename A>
__device__ __forceinline__ A sum_of_lanes(A value) {
#pragma unroll
  for (int step = L / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// Never joined with an addition that follows: forward and backward have to see the same score, of any size.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

template <typename A>
__device__ __forceinline__ void load_end(const A* from, A& top, A& factor, A& delta) {
  if constexpr (sizeof(A) == 4) {
    Pack<A, 4> all;
    load(from, all);
    top = all.values[0];
    factor = all.values[1];
    delta = all.values[2];
  } else {
    top = __ldg(from);
    factor = __ldg(from + 1);
    delta = __ldg(from + 2);
  }
}

template <typename T, int N>
__device__ __forceinline__ Acc<T> dot(const Pack<T, N>& a, const Pack<T, N>& b) {
  Acc<T> sum = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) sum += widen(a.values[n]) * widen(b.values[n]);
  return sum;
}

template <typename T, int N, typename A>
__device__ __forceinline__ void store_features(T* to, const A* values, A factor) {
  Pack<T, N> pack;
#pragma unroll
  for (int n = 0; n < N; ++n) pack.values[n] = narrow<T>(values[n] * factor);
  store(to, pack);
}

// L lanes to a worker, each with R vectors of a head. EDGES: there are biases or factors of edges.
template <typename T, typename I, int L, int R, Mode MODE, bool EDGES>
__global__ void __launch_bounds__(Config::threads, MODE == Mode::columns ? 3 : 4) rows_kernel(const Params<T, I> p) {
  using A = Acc<T>;
  constexpr int N = 16 / sizeof(T), batch = Config::batch / R;
  constexpr bool FORWARD = MODE == Mode::forward, COLUMNS = MODE == Mode::columns;
  static_assert(batch <= L, "a lane sees to an edge of a batch");
  static_assert(kPieceRun % batch == 0, "a batch lies in one run of its piece");
  const int lane = threadIdx.x % L;
  const int64_t worker = static_cast<int64_t>(blockIdx.x) * (blockDim.x / L) + threadIdx.x / L;
  const int64_t item = p.heads == 1 ? worker : worker / p.heads;
  const int head = static_cast<int>(worker - item * p.heads);
  const Span<I> span = span_of(p.rows, item);
  int d[R];  // the lane's features; lanes past the end of the head read its first ones, and count for nothing
  bool inside[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int from = (r * L + lane) * N;
    inside[r] = from < p.per_head;
    d[r] = head * p.per_head + (inside[r] ? from : 0);
  }
  const int width = static_cast<int>(p.width);
  const int64_t own_row = static_cast<int64_t>(span.row) * p.width,
                own_scalar = static_cast<int64_t>(span.row) * p.heads + head;
  Pack<T, N> own_first[R], own_second[R];
  A top = 0, factor = 0, delta = 0;  // of a destination
#pragma unroll
  for (int r = 0; r < R; ++r) {
    own_first[r].raw = own_second[r].raw = {};
    if (!span.present) continue;
    load(p.own_first + own_row + d[r], own_first[r]);
    if (!FORWARD) load(p.own_second + own_row + d[r], own_second[r]);
  }
  if (MODE == Mode::rows && span.present) {
    load_end(p.ends + 4 * own_scalar, top, factor, delta);
  }
  Softmax<A, R * N> state;  // backward: `value` alone, sums of what is gathered second
  state.clear();
  A sum_first[R * N] = {};

  I k = span.begin;
  const I end = span.end;
  I next_source[batch];
  auto load_sources = [&]() {
#pragma unroll
    for (int u = 0; u < batch; ++u) next_source[u] = u < end - k ? __ldg(p.indices + k + u) : I{0};
  };
  load_sources();
#pragma unroll 1
  while (__any_sync(~0u, k < end)) {
    const I here = k, left = end - k;
    I source[batch];
#pragma unroll
    for (int u = 0; u < batch; ++u) source[u] = next_source[u];
    const I next = (k + batch - span.begin) % kPieceRun ? batch : batch + span.skip;
    k = left > next ? k + next : end;
    load_sources();
    Pack<T, N> first[batch][R], second[batch][R];
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      const T *from_first = row_address(p.first, source[u], width),
              *from_second = row_address(p.second, source[u], width);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        first[u][r].raw = second[u][r].raw = {};
        if (u >= left) continue;
        load(from_first + d[r], first[u][r]);
        load(from_second + d[r], second[u][r]);
      }
    }
    // What belongs to edges, of one nonzero of the batch to a lane.
    const int mine = lane % batch;
    A bias = 0, mask = 1;
    int64_t scalar = 0;  // where it is
    if ((EDGES || (COLUMNS && p.grad_scores)) && mine < left) {
      const int64_t edge = p.edge_ids ? static_cast<int64_t>(__ldg(p.edge_ids + here + mine)) : here + mine;
      scalar = edge * p.heads + head;
      if (EDGES && p.edge_bias) bias = load_one(p.edge_bias + scalar);
      if (EDGES && p.factor.any()) mask = p.factor.of(scalar);
    }
    A score[batch], product[batch];
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      score[u] = product[u] = 0;
#pragma unroll
      for (int r = 0; r < R; ++r) {  // a zero of its own would not do: what it meets may be infinite
        score[u] += inside[r] ? dot(first[u][r], own_first[r]) : A(0);
        if (!FORWARD) product[u] += inside[r] ? dot(second[u][r], own_second[r]) : A(0);
      }
      score[u] = rounded_product(sum_of_lanes<L>(score[u]), p.scale);
      if (EDGES) score[u] += __shfl_sync(~0u, bias, u, L);
      if (!FORWARD) product[u] = sum_of_lanes<L>(product[u]);
    }
    if constexpr (FORWARD) {
      top = -INFINITY;
#pragma unroll
      for (int u = 0; u < batch; ++u) top = u < left && score[u] > top ? score[u] : top;
      if (top > state.top) state.raise(top);
    }
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      if constexpr (COLUMNS) {
        if (u < left) {
          load_end(p.ends + 4 * (static_cast<int64_t>(source[u]) * p.heads + head), top, factor, delta);
        }
      }
      A weight_first = 0, weight_second = 0;
      const A factor_of_edge = EDGES ? __shfl_sync(~0u, mask, u, L) : A(1);
      if (u < left) {
        const A probability = FORWARD ? state.weigh(score[u]) : exp(score[u] - top) * factor;
        if (FORWARD) state.sum += probability;
        weight_second = probability * factor_of_edge;
        const A grad_score = probability * (factor_of_edge * product[u] - delta);
        weight_first = grad_score * p.scale;
        if (COLUMNS && p.grad_scores && lane == u) {
          p.grad_scores[scalar] = narrow<T>(EDGES && p.edge_bias ? grad_score : weight_first);
        }
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          if (!FORWARD) sum_first[r * N + n] += weight_first * widen(first[u][r].values[n]);
          if (MODE != Mode::rows) state.value[r * N + n] += weight_second * widen(second[u][r].values[n]);
        }
      }
    }
  }

  if (!span.present) return;
  const bool empty = span.begin == span.end, whole = span.part < 0;
  if (FORWARD) factor = empty ? A(0) : 1 / state.sum;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (!inside[r]) continue;
    if (whole) {
      if (!FORWARD) store_features<T, N>(p.sum_first + own_row + d[r], sum_first + r * N, A(1));
      if (MODE != Mode::rows)
        store_features<T, N>(p.sum_second + own_row + d[r], state.value + r * N, FORWARD ? factor : A(1));
      continue;
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (!FORWARD) p.pieces_first[span.part * p.width + d[r] + n] = sum_first[r * N + n];
      if (MODE != Mode::rows) p.pieces_second[span.part * p.width + d[r] + n] = state.value[r * N + n];
    }
  }
  if (!FORWARD || lane) return;
  if (whole) {
    p.stats_out[2 * own_scalar] = empty ? A(0) : state.top;
    p.stats_out[2 * own_scalar + 1] = factor;
  } else {
    A* stats = p.piece_stats + (span.part * p.heads + head) * 2;
    stats[0] = state.top;
    stats[1] = state.sum;
  }
}

// How the pieces of a row become the row.
template <typename T, typename I, Mode MODE>
struct Merge {
  struct Sums {
    Acc<T> first, second;
    __device__ __forceinline__ void clear() { first = second = 0; }
  };
  static constexpr bool forward = MODE == Mode::forward;
  using State = std::conditional_t<forward, Softmax<Acc<T>, 1>, Sums>;
  Params<T, I> p;

  __device__ __forceinline__ State read(int64_t part, int64_t d) const {
    State state;
    state.clear();
    if constexpr (forward) {
      const Acc<T>* stats = p.piece_stats + (part * p.heads + d / p.per_head) * 2;
      state.top = stats[0];
      state.sum = stats[1];
      state.value[0] = p.pieces_second[part * p.width + d];
    } else {
      state.first = p.pieces_first[part * p.width + d];
      if (MODE == Mode::columns) state.second = p.pieces_second[part * p.width + d];
    }
    return state;
  }
  __device__ __forceinline__ void add(State& to, const State& other) const {
    if constexpr (forward) {
      to.merge(other);
    } else {
      to.first += other.first;
      to.second += other.second;
    }
  }
  __device__ __forceinline__ void write(const Pieces<I>& pieces, int64_t d, const State& state) const {
    const int64_t at = pieces.row * p.width + d;
    if constexpr (forward) {
      p.sum_second[at] = narrow<T>(state.value[0] / state.sum);
      if (d % p.per_head == 0) {
        Acc<T>* stats = p.stats_out + 2 * (pieces.row * p.heads + d / p.per_head);
        stats[0] = state.top;
        stats[1] = 1 / state.sum;
      }
    } else {
      p.sum_first[at] = narrow<T>(state.first);
      if (MODE == Mode::columns) p.sum_second[at] = narrow<T>(state.second);
    }
  }
};

template <Mode MODE, typename T, typename I>
cudaError_t launch(const Params<T, I>& p, cudaStream_t stream) {
  auto run = [&](auto lanes, auto vectors) {
    const unsigned blocks = static_cast<unsigned>(ceil_div(p.rows.workers * p.heads, Config::threads / lanes));
    const bool edges = p.edge_bias || p.factor.scale || p.factor.seed;
    if (edges) {
      rows_kernel<T, I, lanes, vectors, MODE, true><<<blocks, Config::threads, 0, stream>>>(p);
    } else {
      rows_kernel<T, I, lanes, vectors, MODE, false><<<blocks, Config::threads, 0, stream>>>(p);
    }
    return cudaGetLastError();
  };
  using std::integral_constant;
  using One = integral_constant<int, 1>;
  using Two = integral_constant<int, 2>;
  const int vectors = p.per_head * static_cast<int>(sizeof(T)) / 16;
  const cudaError_t status = vectors <= 2    ? run(Two{}, One{})
                             : vectors <= 4  ? run(integral_constant<int, 4>{}, One{})
                             : vectors <= 8  ? run(integral_constant<int, 8>{}, One{})
                             : vectors <= 16 ? run(integral_constant<int, 16>{}, One{})
                             : vectors <= 32 ? run(integral_constant<int, 16>{}, Two{})
                                             : run(integral_constant<int, 32>{}, Two{});
  return status == cudaSuccess ? merge_pieces(p.rows, p.width, Merge<T, I, MODE>{p}, stream) : status;
}

// Accumulators of the workspace, for pieces.
inline int64_t piece_values(const Csr& graph, const WorkList& work, const DotAttention& given) {
  const int64_t parts = rows_of<int32_t>(graph, work).num_parts, width = given.width;
  const Mode mode = given.mode();
  if (mode == Mode::forward) return parts * (width + 2 * given.num_heads);
  return parts * (mode == Mode::columns ? 2 * width : width);
}

// Whether the kernel takes the features.
inline bool fits(const DotAttention& given) {
  return given.width / given.num_heads * size_of(given.dtype) <= 16 * Config::max_vectors;
}

// One direction.
template <Mode MODE>
cudaError_t solve(const Csr& graph, const WorkList& work, const DotAttention& given, void* scratch,
                  cudaStream_t stream) {
  return with_types(given.dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    using A = Acc<T>;
    auto features = [](const void* from) { return static_cast<const T*>(from); };
    Params<T, I> p{};
    p.rows = rows_of<I>(graph, work);
    p.indices = static_cast<const I*>(graph.indices);
    p.edge_ids = static_cast<const I*>(graph.edge_ids);
    p.first = features(MODE == Mode::columns ? given.query : given.key);
    p.second = features(MODE == Mode::columns ? given.grad_out : given.value);
    p.own_first = features(MODE == Mode::columns ? given.key : given.query);
    p.own_second = features(MODE == Mode::columns ? given.value : given.grad_out);
    p.edge_bias = features(given.edge_bias);
    p.factor = EdgeFactors<T>(given.factor);
    p.ends = static_cast<const A*>(given.ends);
    p.sum_first = static_cast<T*>(MODE == Mode::columns ? given.grad_key : given.grad_query);
    p.sum_second = static_cast<T*>(MODE == Mode::columns ? given.grad_value : given.out);
    p.grad_scores = static_cast<T*>(given.grad_scores);
    p.stats_out = static_cast<A*>(given.stats);
    p.scale = static_cast<A>(given.scale);
    p.heads = static_cast<int>(given.num_heads);
    p.per_head = static_cast<int>(given.width / given.num_heads);
    p.width = given.width;
    p.pieces_first = static_cast<A*>(scratch);
    p.pieces_second = p.pieces_first + (MODE == Mode::columns ? p.rows.num_parts * p.width : 0);
    p.piece_stats = p.pieces_second + p.rows.num_parts * p.width;
    return launch<MODE>(p, stream);
  });
}

// The forward without query and key; edge_attention.cu.
cudaError_t given_forward(Workspace& workspace, const Csr& graph, const WorkList& work, const DotAttention& given,
                          cudaStream_t stream);

// A backward direction; dot_attention_backward.cu.
cudaError_t backward(const Csr& graph, const WorkList& work, const DotAttention& given, void* scratch,
                     cudaStream_t stream);

}  // namespace dot_attention_impl
}  // namespace cuda
}  // namespace gnnaccel
