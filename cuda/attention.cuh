// Additive attention along the rows of a graph, forward and backward: one gather of features each.
//
// A worker is a group of 4 to 16 lanes, 16 bytes of features each, that takes one row, or one piece of a long one, as
// in spmm_rows.cu. Forward it keeps the row's maximum so far, and scales what it has summed up whenever that grows
// (online softmax); nothing is stored per edge. Backward, over the transposed graph, probabilities
// come from the saved log-sum-exp. The derivative of a score is linear in the inner product of features and gradient,
// of which only the sum over the row is wanted: lanes add up their shares, and meet once at its end.
//
// Scores of nodes, and their gradients, are accumulators: those of 16-bit features would lose digits that the softmax
// makes much of.
//
// Where a slice of features lies in one head, a lane computes the weight of one nonzero of a tile, and shuffles hand it
// round; else the lanes of a head share out those of each batch of gathers.
//
// Rows are handed out by rows.cuh; pieces of long ones meet in the workspace, and pieces.cuh merges them.
//
// Formulas: ../cpp/attention.cpp.
#pragma once

#include "pieces.cuh"
#include "softmax.cuh"

namespace gnnaccel {
namespace cuda {
namespace attention_impl {

// kept: a forward that also sums up what the backward needs, out_pos and p_pos. given: a forward whose scores are those
// of edges, and that keeps nothing.
enum class Mode { forward, kept, given, backward };

struct Config {
  static constexpr int threads = 256;  // where no work list says otherwise
  static constexpr int max_lanes = 16;
  // Long rows are worked on in narrower slices: more of them in step, a smaller table in the caches; see spmm.cu.
  static constexpr int dense_lanes = 8;
  static constexpr int64_t dense_degree = 256;
  static constexpr int batch = 4;  // gathers of a lane in flight
};

// Features as workers see them. Heads of at least a slice are cut into slices; smaller ones share one.
struct Shape {
  int lanes;
  bool one_head;        // of a slice
  int slices_per_head;  // 1 where heads share a slice
  int heads_per_slice;  // 1 where a head is cut
  int64_t slices;
};

inline Shape shape_of(const Csr& graph, const WorkList& work, int64_t heads, int64_t width, DType dtype) {
  const int64_t n = 16 / size_of(dtype), per_head = width / heads / n;  // 16-byte vectors
  const bool dense = work.items && !work.clustered && graph.nnz / graph.num_rows >= Config::dense_degree;
  const int max_lanes = dense ? Config::dense_lanes : Config::max_lanes;
  const bool one_head = heads == 1 || per_head >= max_lanes;
  const int64_t vectors = one_head ? per_head : per_head * heads;
  int lanes = 4;
  while (lanes < max_lanes && lanes < vectors) lanes *= 2;
  Shape shape{lanes, one_head, 1, 1, heads};
  if (one_head) {
    shape.slices_per_head = static_cast<int>(ceil_div(per_head, lanes));
    shape.slices = heads * shape.slices_per_head;
  } else {
    shape.heads_per_slice = static_cast<int>(lanes / per_head);
    shape.slices = ceil_div(heads, shape.heads_per_slice);
  }
  return shape;
}

template <typename T, typename I>
struct Params {
  using A = Acc<T>;
  Rows<I> rows;
  const I* indices;
  const I* edge_ids;
  const T* x;          // [columns, width]: what is gathered; backward: the gradient of out
  const A* score;      // [columns, heads], forward
  const T* given;      // [nnz, heads], given
  const A* ends;       // [columns, heads, 4], backward: score, log-sum-exp and delta of a destination
  const A* own_score;  // [rows, heads]
  const T* y;          // [rows, width], backward: features
  EdgeFactors<T> factor;
  T* out;          // [rows, width]; backward: the gradient of the features
  T* out_pos;      // the same, kept
  A* lse;          // [rows, heads], forward
  A* p_pos;        // the same, kept
  A* grad_score;   // [rows, heads], backward, where a head is not cut
  A* grad_shares;  // [slices_per_head, rows, heads], where it is
  A* values;       // [parts, width], in the workspace
  A* values_pos;   // the same, kept
  A* stats;  // forward: [parts, heads, 3]: maximum, sum, sum of positive; backward: [parts, slices_per_head, heads]
  A slope;
  int heads;
  int per_head;
  int64_t width;
  int slices_per_head;
  int heads_per_slice;
};

// Writes N features of a finished row; `scalars`: and what there is once per head. Nothing summed up: no nonzeros.
template <Mode MODE, typename T, typename I, int N>
__device__ __forceinline__ void write_row(const Params<T, I>& p, const Softmax<Acc<T>, N>& state, int64_t row,
                                          int64_t d, int head, bool empty, bool scalars) {
  Pack<T, N> to;
  const Acc<T> factor = empty ? Acc<T>(0) : 1 / state.sum;
#pragma unroll
  for (int i = 0; i < N; ++i) to.values[i] = narrow<T>(state.value[i] * factor);
  store(p.out + row * p.width + d, to);
  if constexpr (MODE == Mode::kept) {
#pragma unroll
    for (int i = 0; i < N; ++i) to.values[i] = narrow<T>(state.value_pos[i] * factor);
    store(p.out_pos + row * p.width + d, to);
    if (scalars) p.p_pos[row * p.heads + head] = state.sum_pos * factor;
  }
  if (MODE != Mode::given && scalars) p.lse[row * p.heads + head] = empty ? Acc<T>(0) : state.top + log(state.sum);
}

template <typename T, typename I>
__device__ __forceinline__ void write_grad_score(const Params<T, I>& p, Acc<T> value, int64_t row, int head,
                                                 int slice) {
  if (p.slices_per_head == 1) {
    p.grad_score[row * p.heads + head] = value;
  } else {
    p.grad_shares[(slice * p.rows.num_rows + row) * p.heads + head] = value;
  }
}

// Registers for two blocks of 512 threads on a multiprocessor, but for the widest accumulators.
template <typename T, typename I>
constexpr int min_blocks = sizeof(T) <= 4 && sizeof(I) == 4 ? 2 : 1;

// SHARED: lanes that share out the scores of a batch among themselves, of those that have one head: as many as there
// are, up to a batch; kOneHead: a slice has one head, and the lanes share out a tile of L nonzeros.
constexpr int kOneHead = 0;

template <typename T, typename I, int L, int SHARED, Mode MODE>
__global__ void __launch_bounds__(kMaxListThreads, min_blocks<T, I>) rows_kernel(const Params<T, I> p) {
  using A = Acc<T>;
  constexpr int N = 16 / sizeof(T);
  constexpr int batch = Config::batch;
  constexpr bool BACKWARD = MODE == Mode::backward;
  constexpr bool ONE_HEAD = SHARED == kOneHead;
  constexpr int own = ONE_HEAD ? 1 : batch / SHARED;  // scores of a lane in a batch, or in a tile
  static_assert(L >= batch && kPieceRun % L == 0, "a tile of L nonzeros lies in one run of its piece");
  const int lane = threadIdx.x % L;
  // The lane's features: of head `head`, from `inside` on; it is member `member` of the lanes that have this head.
  int head, inside, member = lane, slice = 0;
  bool active;
  if constexpr (ONE_HEAD) {
    head = blockIdx.y / p.slices_per_head;
    slice = blockIdx.y % p.slices_per_head;
    inside = (slice * L + lane) * N;
    active = inside < p.per_head;
  } else {
    const int vectors = p.per_head / N, of_slice = lane / vectors;
    member = lane % vectors;
    head = blockIdx.y * p.heads_per_slice + of_slice;
    inside = member * N;
    active = of_slice < p.heads_per_slice && head < p.heads;
    if (!active) head = 0;
  }
  if (!active) inside = 0;  // these lanes repeat what others do, and write nothing
  const int first_member = lane - member;
  const int64_t d = static_cast<int64_t>(head) * p.per_head + inside;
  const Span<I> span = span_of(p.rows, static_cast<int64_t>(blockIdx.x) * (blockDim.x / L) + threadIdx.x / L);
  I k = span.begin;
  const I end = span.end;
  auto load_source = [&]() { return lane < end - k ? __ldg(p.indices + k + lane) : I{0}; };
  I source = load_source();
  const A base =
      MODE != Mode::given && span.present ? __ldg(p.own_score + static_cast<int64_t>(span.row) * p.heads + head) : A(0);
  const int width = static_cast<int>(p.width);
  const T* features = p.x + d;
  Pack<T, N> y;
  y.raw = {};
  if (BACKWARD && span.present) load(p.y + static_cast<int64_t>(span.row) * p.width + d, y);
  Softmax<A, N> state;  // backward: value alone, and `share` of the score's gradient
  state.clear();
  A share = 0;

  // Of one nonzero: its score beyond the log-sum-exp where that is known, whether it is positive, and its delta.
  struct Score {
    A value;
    A delta;
    bool positive;
  };
  auto score_of = [&](I col, I edge) {
    Score score{0, 0, false};
    A sum = base, lse = 0;
    if constexpr (BACKWARD) {
      const A* from = p.ends + (static_cast<int64_t>(col) * p.heads + head) * 4;
      if constexpr (sizeof(A) == 4) {
        Pack<A, 4> all;
        load(from, all);
        sum += all.values[0];
        lse = all.values[1];
        score.delta = all.values[2];
      } else {
        sum += __ldg(from);
        lse = __ldg(from + 1);
        score.delta = __ldg(from + 2);
      }
    } else if constexpr (MODE == Mode::given) {
      score.value = load_one(p.given + static_cast<int64_t>(edge) * p.heads + head);
      return score;
    } else {
      sum += __ldg(p.score + static_cast<int64_t>(col) * p.heads + head);
    }
    score.positive = sum > 0;
    score.value = (score.positive ? sum : sum * p.slope) - lse;
    return score;
  };
  auto scale_of = [&](I edge) {
    return p.factor.any() ? p.factor.of(static_cast<int64_t>(edge) * p.heads + head) : A(1);
  };
  // The value of the lane `step` away among those that share out scores.
  constexpr int sharing = ONE_HEAD ? L : SHARED;
  auto partner = [&](A value, int step) {
    if constexpr (ONE_HEAD) return __shfl_xor_sync(~0u, value, step);
    return __shfl_sync(~0u, value, first_member + ((member % sharing) ^ step), L);
  };
  // What the lane's own nonzeros weigh, of which `there` are: softmax, times the scale of an edge.
  auto weigh = [&](const Score(&score)[own], const bool (&there)[own], const A(&scale)[own], A(&weight)[own]) {
    if constexpr (!BACKWARD) {
      A top = score[0].value;
#pragma unroll
      for (int s = 1; s < own; ++s) top = score[s].value > top ? score[s].value : top;
#pragma unroll
      for (int step = sharing / 2; step; step /= 2) {
        const A other = partner(top, step);
        top = other > top ? other : top;
      }
      if (top > state.top) state.raise(top);
    }
    const bool counts = ONE_HEAD ? slice == 0 : member < sharing;  // the others repeat what these have
#pragma unroll
    for (int s = 0; s < own; ++s) {
      A probability = 0;
      if constexpr (BACKWARD) {
        probability = there[s] ? exp(score[s].value) : A(0);
        if (counts) share -= probability * score[s].delta * (score[s].positive ? A(1) : p.slope);
      } else {
        probability = there[s] ? state.weigh(score[s].value) : A(0);
        state.sum += probability;  // of the lane's own nonzeros; lanes meet at the end of the row
        if (MODE == Mode::kept && score[s].positive) state.sum_pos += probability;
      }
      weight[s] = there[s] ? probability * scale[s] : A(0);
    }
  };
  // Adds weight times the gathered features, of a nonzero whose score is positive or not.
  auto add = [&](A weight, bool positive, const Pack<T, N>& x) {
    A dot = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const A value = widen(x.values[i]);
      state.value[i] += weight * value;
      if constexpr (MODE == Mode::kept) state.value_pos[i] += positive ? weight * value : A(0);
      if constexpr (BACKWARD) dot += value * widen(y.values[i]);
    }
    if constexpr (BACKWARD) share += (positive ? weight : weight * p.slope) * (active ? dot : A(0));
  };

#pragma unroll 1
  while (__any_sync(~0u, k < end)) {
    const I left = end - k, col = source;
    I edge = k + lane;
    if ((MODE == Mode::given || p.factor.any()) && p.edge_ids && lane < left) edge = __ldg(p.edge_ids + edge);
    const I next = (k + L - span.begin) % kPieceRun ? L : L + span.skip;
    k = left > next ? k + next : end;
    source = load_source();
    Pack<T, N> x[batch];
    auto fetch = [&](int first) {
#pragma unroll
      for (int u = 0; u < batch; ++u) {
        const I from = __shfl_sync(~0u, col, first + u, L);
        x[u].raw = {};
        if (first + u < left) load(row_address(features, from, width), x[u]);
      }
    };
    Score score[own];
    bool there[own];
    A scale[own], weight[own];
    unsigned positive[own] = {};
    // Scores of the lane's own nonzeros: `first` of the tile and every SHARED-th from there.
    auto find = [&](int first) {
#pragma unroll
      for (int s = 0; s < own; ++s) {
        const int j = ONE_HEAD ? lane : first + s * SHARED + member % sharing;
        const I from = ONE_HEAD ? col : __shfl_sync(~0u, col, j, L),
                id = ONE_HEAD ? edge : __shfl_sync(~0u, edge, j, L);
        there[s] = j < left;
        score[s] = {-INFINITY, 0, false};
        scale[s] = 0;
        if (there[s]) {
          score[s] = score_of(from, id);
          scale[s] = scale_of(id);
        }
      }
      weigh(score, there, scale, weight);
#pragma unroll
      for (int s = 0; s < own; ++s) {
        if constexpr (MODE == Mode::kept || BACKWARD) positive[s] = group_ballot<L>(score[s].positive);
      }
    };
    if constexpr (ONE_HEAD) find(0);
#pragma unroll 1
    for (int first = 0; first < L && __any_sync(~0u, first < left); first += batch) {
      fetch(first);
      if constexpr (!ONE_HEAD) find(first);
#pragma unroll
      for (int u = 0; u < batch; ++u) {
        // Who has this one, and where.
        const int owner = ONE_HEAD ? first + u : first_member + u % sharing;
        const int s = ONE_HEAD ? 0 : u / (ONE_HEAD ? batch : SHARED);
        add(SHARED == 1 ? weight[s] : __shfl_sync(~0u, weight[s], owner, L), positive[s] >> owner & 1, x[u]);
      }
    }
  }

  if constexpr (BACKWARD) {  // the lanes of a head meet in its first
    const int members = ONE_HEAD ? L : p.per_head / N;
#pragma unroll
    for (int step = 1; step < L; step *= 2) {
      const A other = __shfl_sync(~0u, share, (lane + step) % L, L);
      if (member + step < members && lane + step < L) share += other;
    }
  } else {
#pragma unroll
    for (int step = sharing / 2; step; step /= 2) {
      state.sum += partner(state.sum, step);
      if (MODE == Mode::kept) state.sum_pos += partner(state.sum_pos, step);
    }
  }
  if (!span.present || !active) return;
  const bool first_lane = member == 0;
  if (span.part >= 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      p.values[span.part * p.width + d + i] = state.value[i];
      if (MODE == Mode::kept) p.values_pos[span.part * p.width + d + i] = state.value_pos[i];
    }
    if (BACKWARD && first_lane) p.stats[(span.part * p.slices_per_head + slice) * p.heads + head] = share;
    if (!BACKWARD && first_lane && slice == 0) {
      A* to = p.stats + (span.part * p.heads + head) * 3;
      to[0] = state.top;
      to[1] = state.sum;
      to[2] = state.sum_pos;
    }
    return;
  }
  if constexpr (BACKWARD) {
    Pack<T, N> to;
#pragma unroll
    for (int i = 0; i < N; ++i) to.values[i] = narrow<T>(state.value[i]);
    store(p.out + static_cast<int64_t>(span.row) * p.width + d, to);
    if (first_lane) write_grad_score(p, share, span.row, head, slice);
  } else {
    write_row<MODE>(p, state, span.row, d, head, span.begin == span.end, first_lane && slice == 0);
  }
}

// How the pieces of a row become the row.
template <typename T, typename I, Mode MODE>
struct Merge {
  using State = Softmax<Acc<T>, 1>;
  static constexpr bool backward = MODE == Mode::backward;
  Params<T, I> p;

  __device__ __forceinline__ State read(int64_t part, int64_t d) const {
    State state;
    state.clear();
    state.value[0] = p.values[part * p.width + d];
    if constexpr (!backward) {
      const Acc<T>* stats = p.stats + (part * p.heads + d / p.per_head) * 3;
      state.top = stats[0];
      state.sum = stats[1];
      state.sum_pos = stats[2];
      if (MODE == Mode::kept) state.value_pos[0] = p.values_pos[part * p.width + d];
    }
    return state;
  }
  __device__ __forceinline__ void add(State& to, const State& other) const {
    if constexpr (backward) {
      to.value[0] += other.value[0];
    } else {
      to.merge(other);
    }
  }
  __device__ __forceinline__ void write(const Pieces<I>& pieces, int64_t d, const State& state) const {
    const int head = static_cast<int>(d / p.per_head);
    const bool scalars = d % p.per_head == 0;
    if constexpr (backward) {
      p.out[pieces.row * p.width + d] = narrow<T>(state.value[0]);
      for (int slice = 0; scalars && slice < p.slices_per_head; ++slice) {
        Acc<T> share = 0;
        for (int64_t j = 0; j < pieces.count; ++j)
          share += p.stats[(pieces[j] * p.slices_per_head + slice) * p.heads + head];
        write_grad_score(p, share, pieces.row, head, slice);
      }
    } else {
      write_row<MODE>(p, state, pieces.row, d, head, false, scalars);
    }
  }
};

template <Mode MODE, typename T, typename I>
cudaError_t launch(const Params<T, I>& p, const Shape& shape, const Csr& graph, cudaStream_t stream) {
  const int threads = p.rows.items ? list_threads(graph) : Config::threads;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.rows.workers, threads / shape.lanes)),
                  static_cast<unsigned>(shape.slices));
  using std::integral_constant;
  auto run = [&](auto lanes, auto shared) {
    rows_kernel<T, I, lanes, shared, MODE><<<grid, threads, 0, stream>>>(p);
    return cudaGetLastError();
  };
  auto with_lanes = [&](auto lanes) {
    const int members = p.per_head * static_cast<int>(sizeof(T)) / 16;
    if (shape.one_head) return run(lanes, integral_constant<int, kOneHead>{});
    if (members == 1) return run(lanes, integral_constant<int, 1>{});
    if constexpr (lanes > 4) {  // two heads at least share the lanes
      if (members >= 4) return run(lanes, integral_constant<int, 4>{});
    }
    return run(lanes, integral_constant<int, 2>{});
  };
  const cudaError_t status = shape.lanes == 4   ? with_lanes(integral_constant<int, 4>{})
                             : shape.lanes == 8 ? with_lanes(integral_constant<int, 8>{})
                                                : with_lanes(integral_constant<int, 16>{});
  return status == cudaSuccess ? merge_pieces(p.rows, p.width, Merge<T, I, MODE>{p}, stream) : status;
}

// What both directions set.
template <typename T, typename I>
Params<T, I> params_of(const Csr& graph, const WorkList& work, const Shape& shape, const EdgeFactor& factor,
                       double slope, int64_t num_heads, int64_t width) {
  Params<T, I> p{};
  p.rows = rows_of<I>(graph, work);
  p.indices = static_cast<const I*>(graph.indices);
  p.edge_ids = static_cast<const I*>(graph.edge_ids);
  p.factor = EdgeFactors<T>(factor);
  p.slope = static_cast<Acc<T>>(slope);
  p.heads = static_cast<int>(num_heads);
  p.per_head = static_cast<int>(width / num_heads);
  p.width = width;
  p.slices_per_head = shape.slices_per_head;
  p.heads_per_slice = shape.heads_per_slice;
  return p;
}

// Accumulators of the workspace, for pieces.
inline int64_t piece_values(int64_t num_parts, const Shape& shape, int64_t heads, int64_t width, Mode mode) {
  const int64_t stats = mode == Mode::backward ? shape.slices_per_head * heads : 3 * heads;
  return num_parts * ((mode == Mode::kept ? 2 : 1) * width + stats);
}

// Hands the workspace from `to` on out to the pieces; returns what follows.
template <typename T, typename I>
Acc<T>* place_pieces(Params<T, I>& p, Acc<T>* to, Mode mode) {
  p.values = to;
  to += p.rows.num_parts * p.width;
  if (mode == Mode::kept) {
    p.values_pos = to;
    to += p.rows.num_parts * p.width;
  }
  p.stats = to;
  return to + p.rows.num_parts * p.heads * (mode == Mode::backward ? p.slices_per_head : 3);
}

}  // namespace attention_impl
}  // namespace cuda
}  // namespace gnnaccel
