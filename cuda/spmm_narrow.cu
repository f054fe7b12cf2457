// SpMM of one to four features: sums and means, of sources copied or with one weight an edge, or of edges.
//
// Rows this narrow leave the lanes of the other kernels without work: of one feature, three quarters of the smallest
// group. Here a lane gathers whole sources, and 1 to 32 lanes, as rows are long in the mean, add up a row. Rows are
// taken as they come, so that neighbours read neighbouring indices and write neighbouring results, without a list. Rows
// much longer than most are left to a warp, still longer ones to a block (CSR-vector and CSR-stream: Bell and Garland,
// 2009; Greathouse and Daga, 2014). Where there may be rows too long for that, blocks of their own take pieces of them
// first, and a second kernel adds these up in order. Nothing is zero-filled or added atomically, and the bits are the
// same on every run.
//
// What a sum of one feature has to move: 4 bytes a nonzero and 8 a row (int32, float32) and its sources' values from
// L2; road-like (1M rows, 2.7M nonzeros) 19 MB, 6 us of an H100's memory.
#include "spmm.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 256;
  static constexpr int warps = threads / 32;
  // Nonzeros of a lane, in the mean: less than six, which meshes and the like have in each row. Of a graph of fewer
  // than `few_nonzeros`, whose rows leave threads without work, two; and of one that leaves most of them without work,
  // as few as its longest row needs.
  static constexpr double lane_run = 5.9, few_run = 2;
  static constexpr int64_t few_threads = 1 << 17, short_run = 8;
  static constexpr int longest_run = 16;  // a row of more for each of its lanes is left to a warp or a block
  static constexpr int in_flight = 4;     // neighbouring nonzeros of a lane: their indices come in one load
  // Rows of more nonzeros are cut, into pieces between multiples of `piece`.
  static constexpr int64_t longest = 8192, piece = 4096;
  // Which graphs are for this kernel (`pays`): nonzeros, rows, mean degrees, and the longest row of an even graph.
  static constexpr int64_t few_nonzeros = 400000, many_nonzeros = 1200000, few_rows = 4096;
  static constexpr int64_t few_degree = 16, even_degree = 64;
  static constexpr int64_t many_sources = 1 << 20;  // a copy in rows of 16 bytes, which lists read, takes much of L2
  static_assert(longest >= piece, "a row that is cut holds a multiple");
};

template <typename T, typename I>
struct Params {
  const I* indptr;
  const I* indices;  // null: each nonzero has a source of its own, in their order
  const I* edge_ids;
  SourceScale<T, I> source_scale;
  int64_t num_rows;
  int64_t nnz;
  const T* x;
  Operand rhs;
  T* out;
  int64_t num_feats;
  bool mean;
  bool in_runs;  // indices, edge_ids and weights lie so that four of them are one load, or two
  double empty_value;
  Epilogue<T> epilogue;
  int lanes;            // of a row, a power of two
  unsigned cut_blocks;  // that look for pieces of long rows; 0: there are none
  Parts<T, I> parts;    // of each multiple of `piece`, what its row has from it on
  I* cut;               // the row whose first multiple that is, if it is cut; else -1
};

// A row's D values, summed up.
template <typename T, typename I, int D>
struct Row {
  static constexpr int N = vector_of<T, D>;
  Sums<T, I, N> sums[D / N];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < D / N; ++i) sums[i].clear();
  }
  __device__ __forceinline__ Acc<T>& operator[](int d) { return sums[d / N].value[d % N]; }
  // Every lane of a warp calls it.
  __device__ __forceinline__ void add_lanes(int lanes) {
    for (int step = lanes / 2; step; step /= 2) {
#pragma unroll
      for (int d = 0; d < D; ++d) (*this)[d] += __shfl_xor_sync(~0u, (*this)[d], step);
    }
  }
  // Every thread of a block calls it.
  __device__ __forceinline__ void add_block() {
    __shared__ Acc<T> of_warps[Config::warps][D];
    add_lanes(32);
    __syncthreads();  // what the row before left has been read
#pragma unroll
    for (int d = 0; d < D; ++d) {
      if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32][d] = (*this)[d];
    }
    __syncthreads();
#pragma unroll
    for (int d = 0; d < D; ++d) {
      Acc<T> sum = 0;
      for (int w = 0; w < Config::warps; ++w) sum += of_warps[w][d];
      (*this)[d] = sum;
    }
  }
  template <bool EPILOGUE>
  __device__ __forceinline__ void write(const Params<T, I>& p, int64_t row, int64_t degree) const {
#pragma unroll
    for (int i = 0; i < D / N; ++i) sums[i].template write<EPILOGUE>(p, row, i * N, degree);
  }
  __device__ __forceinline__ void write_part(const Params<T, I>& p, int64_t part) const {
#pragma unroll
    for (int i = 0; i < D / N; ++i) sums[i].write_part(p.parts, part, i * N, D);
  }
};

// Values `at` .. at + 3 of an array, `at` a multiple of four.
template <typename T>
struct Run {
  static constexpr int size = Config::in_flight, n = sizeof(T) <= 4 ? size : 2;
  Pack<T, n> parts[size / n];
  template <typename I>
  __device__ __forceinline__ void load(const T* base, I at) {
#pragma unroll
    for (int i = 0; i < size / n; ++i) cuda::load(base + at + i * n, parts[i]);
  }
  __device__ __forceinline__ T operator[](int u) const { return parts[u / n].values[u % n]; }
};

// How a nonzero's source is found. In order, without weights: each has its own, in the order of the nonzeros; a kind of
// its own, as the question whether there are indices cost the others 5 to 40 % (H100).
enum class Kind { none, scalar, fused, in_order };

// Four nonzeros that lie together, from place `at` on; which of them are a row's, the caller says.
template <Kind KIND, typename T, typename I>
struct Nonzeros {
  static constexpr int size = Config::in_flight;
  static constexpr bool in_order = KIND == Kind::in_order;
  static constexpr bool weighs = KIND == Kind::scalar || KIND == Kind::fused;
  I source[size];
  Acc<T> scale[size];

  template <typename F>
  __device__ __forceinline__ void read(const Params<T, I>& p, I at, F inside) {
    const T* weights = static_cast<const T*>(p.rhs.data);
    if (p.in_runs && at <= p.nnz - size) {
      Run<I> run;
      if constexpr (!in_order) run.load(p.indices, at);
#pragma unroll
      for (int u = 0; u < size; ++u) source[u] = in_order ? static_cast<I>(at + u) : run[u];
      if constexpr (weighs) {
        if (!weights) {
#pragma unroll
          for (int u = 0; u < size; ++u) scale[u] = 1;
        } else if (p.edge_ids) {
          run.load(p.edge_ids, at);
#pragma unroll
          for (int u = 0; u < size; ++u) scale[u] = inside(u) ? load_one(weights + run[u]) : 0;
        } else {
          Run<T> values;
          values.load(weights, at);
#pragma unroll
          for (int u = 0; u < size; ++u) scale[u] = widen(values[u]);
        }
      }
      return;
    }
#pragma unroll
    for (int u = 0; u < size; ++u) {
      if (!inside(u)) continue;
      source[u] = in_order ? static_cast<I>(at + u) : __ldg(p.indices + at + u);
      if constexpr (weighs) {
        const I edge = p.edge_ids ? __ldg(p.edge_ids + at + u) : static_cast<I>(at + u);
        scale[u] = weights ? load_one(weights + edge) : 1;
      }
    }
  }
};

// What lane `member` of `step` has of the nonzeros begin .. end - 1: every step-th four of them that lie together.
template <int D, Kind KIND, typename T, typename I>
__device__ __forceinline__ Row<T, I, D> gather(const Params<T, I>& p, I begin, I end, int member, int step) {
  constexpr int N = vector_of<T, D>, size = Config::in_flight;
  using Place = std::make_unsigned_t<I>;  // beyond the last nonzero, too
  const Place first = begin, last = end;
  Row<T, I, D> sum;
  sum.clear();
#pragma unroll 1
  for (Place at = first / size * size + size * member; at < last; at += size * step) {
    const auto inside = [=](int u) { return at + u >= first && at + u < last; };
    Nonzeros<KIND, T, I> nonzeros;
    Pack<T, N> x[size][D / N];
    nonzeros.read(p, static_cast<I>(at), inside);
#pragma unroll
    for (int u = 0; u < size; ++u) {
      if (!inside(u)) continue;
      load_row<D>(p.x, nonzeros.source[u], x[u]);
      if constexpr (KIND == Kind::fused) nonzeros.scale[u] *= p.source_scale[nonzeros.source[u]];
    }
#pragma unroll
    for (int u = 0; u < size; ++u) {
      if (!inside(u)) continue;
#pragma unroll
      for (int d = 0; d < D; ++d) {
        const Acc<T> value = widen(x[u][d / N].values[d % N]);
        sum[d] += nonzeros.weighs ? nonzeros.scale[u] * value : value;
      }
    }
  }
  __syncwarp();
  return sum;
}

// Pieces of long rows: each of the block's warps looks at one multiple of `piece`, far from those of the others, so
// that the pieces of a row go to different blocks. What a row has before its first multiple belongs to the first piece.
template <int D, Kind KIND, typename T, typename I>
__device__ __forceinline__ void take_pieces(const Params<T, I>& p) {
  __shared__ I begins[Config::warps], ends[Config::warps];
  constexpr int64_t piece = Config::piece;
  const int64_t place = blockIdx.x + static_cast<int64_t>(threadIdx.x / 32) * p.cut_blocks;
  const int64_t k = place * piece;
  const I row = find_row_by_group<32>(p.indptr, p.num_rows, static_cast<I>(k < p.nnz ? k : 0));
  const I begin = __ldg(p.indptr + row), end = __ldg(p.indptr + row + 1);
  const bool is_cut = k < p.nnz && k < end && end - begin > Config::longest;
  const bool first = begin > k - piece;
  if (threadIdx.x % 32 == 0) {
    begins[threadIdx.x / 32] = !is_cut ? end : first ? begin : static_cast<I>(k);
    ends[threadIdx.x / 32] = end - k > piece ? static_cast<I>(k + piece) : end;
    if (k < p.nnz) p.cut[place] = is_cut && first ? row : I{-1};
  }
  __syncthreads();
  for (int w = 0; w < Config::warps; ++w) {
    if (begins[w] >= ends[w]) continue;
    Row<T, I, D> sum = gather<D, KIND>(p, begins[w], ends[w], threadIdx.x, Config::threads);
    sum.add_block();
    if (threadIdx.x == 0) sum.write_part(p, blockIdx.x + static_cast<int64_t>(w) * p.cut_blocks);
  }
}

// Blocks of a multiprocessor: gathers wait for memory, and more threads do more for that than more registers.
template <typename T, typename I, int D, Kind KIND>
constexpr int blocks_of = sizeof(T) > 4 || sizeof(I) > 4           ? 1
                          : D == 1 && Nonzeros<KIND, T, I>::weighs ? 8
                          : D <= 2                                 ? 6
                                                                   : 5;

template <typename T, typename I, int D, Kind KIND>
__global__ void __launch_bounds__(Config::threads, blocks_of<T, I, D, KIND>) narrow_kernel(const Params<T, I> p) {
  constexpr bool fused = KIND == Kind::fused;
  if (blockIdx.x < p.cut_blocks) return take_pieces<D, KIND>(p);
  __shared__ int num_long;
  __shared__ int long_rows[Config::threads];
  const int lanes = p.lanes, member = threadIdx.x & (lanes - 1), own = threadIdx.x / lanes;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x - p.cut_blocks) * (Config::threads / lanes);
  const bool there = first_row + own < p.num_rows;
  I begin = 0, end = 0;
  if (there) {
    begin = __ldg(p.indptr + first_row + own);
    end = __ldg(p.indptr + first_row + own + 1);
  }
  if (threadIdx.x == 0) num_long = 0;
  __syncthreads();
  const I degree = end - begin;
  const bool is_long = degree > Config::longest_run * lanes, for_block = degree > Config::longest_run * 32;
  const bool leads = member == 0;
  Row<T, I, D> sum = gather<D, KIND>(p, begin, is_long ? begin : end, member, lanes);
  sum.add_lanes(lanes);
  if (leads && there && !is_long) sum.template write<fused>(p, first_row + own, degree);
  if (leads && for_block && (p.cut_blocks == 0 || degree <= Config::longest)) long_rows[atomicAdd(&num_long, 1)] = own;

  unsigned rest = __ballot_sync(~0u, leads && is_long && !for_block);
  while (rest) {
    const int from = __ffs(rest) - 1;
    rest &= rest - 1;
    const I row_begin = __shfl_sync(~0u, begin, from), row_degree = __shfl_sync(~0u, degree, from);
    Row<T, I, D> row = gather<D, KIND>(p, row_begin, static_cast<I>(row_begin + row_degree), threadIdx.x % 32, 32);
    row.add_lanes(32);
    if (static_cast<int>(threadIdx.x % 32) == from) row.template write<fused>(p, first_row + own, row_degree);
  }
  __syncthreads();
  for (int i = 0; i < num_long; ++i) {
    const int64_t row = first_row + long_rows[i];
    const I row_begin = __ldg(p.indptr + row), row_end = __ldg(p.indptr + row + 1);
    Row<T, I, D> of_row = gather<D, KIND>(p, row_begin, row_end, threadIdx.x, Config::threads);
    of_row.add_block();
    if (threadIdx.x == 0) of_row.template write<fused>(p, row, row_end - row_begin);
  }
}

// A warp adds the pieces of the row whose first multiple it has.
template <typename T, typename I, int D, bool FUSED>
__global__ void __launch_bounds__(Config::threads) join_kernel(const Params<T, I> p) {
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Config::warps + threadIdx.x / 32;
  const I row = first * Config::piece < p.nnz ? p.cut[first] : I{-1};
  if (row < 0) return;
  const int64_t begin = p.indptr[row], end = p.indptr[row + 1], last = (end - 1) / Config::piece;
  double sum[D] = {};
  for (int64_t part = first + lane; part <= last; part += 32) {
#pragma unroll
    for (int d = 0; d < D; ++d) sum[d] += p.parts.values[part * D + d];
  }
  __syncwarp();
  for (int step = 16; step; step /= 2) {
#pragma unroll
    for (int d = 0; d < D; ++d) sum[d] += __shfl_xor_sync(~0u, sum[d], step);
  }
  if (lane != 0) return;
  Row<T, I, D> result;
#pragma unroll
  for (int d = 0; d < D; ++d) result[d] = static_cast<Acc<T>>(sum[d]);
  result.template write<FUSED>(p, row, end - begin);
}

// Multiples of `piece`; none where a list knows that there is no long row.
int64_t pieces_of(const SpmmCall& call) {
  const bool none = call.work.items && call.work.longest <= Config::longest;
  return none ? 0 : ceil_div(call.graph.nnz, Config::piece);
}

int lanes_of(const SpmmCall& call) {
  const int64_t rows = call.graph.num_rows, nnz = call.graph.nnz;
  const double run = nnz < Config::few_nonzeros ? Config::few_run : Config::lane_run;
  int lanes = 1;
  while (lanes < 32 && lanes * run * static_cast<double>(rows) < static_cast<double>(nnz)) lanes *= 2;
  const int64_t longest = call.work.items ? call.work.longest : 0;
  while (lanes < 32 && lanes * rows < Config::few_threads && longest > lanes * Config::short_run) lanes *= 2;
  return lanes;
}

// H100 (products-like: H200), times as fast as along a list, sums and weighted sums of 1, 2, 3 and 4 features:
//   yeast-like (degree 2.1)          4.9 3.9, 3.5 3.4, 2.9 2.8, 2.9 2.7
//   road-like (2.7)                  4.0 4.3, 3.8 3.1, 2.5 2.4, 2.5 2.2
//   dd (5.0)                         2.4 2.3, 2.2 2.2, 1.8 1.8, 1.9 1.9
//   mesh-like (6.0)                  1.2 1.3, 1.2 1.3, 1.1 1.2, 1.2 1.3
//   amazon0505-like (12)             1.1 1.2, 1.2 1.2, 1.0 1.1, 1.1 1.2
//   arxiv-like (14)                  1.0 1.1, 1.0 1.1, 0.9 1.0, 1.0 1.1
//   blogcatalog-like (24)            1.2 1.2, 1.1 1.2, 0.9 1.0, 1.1 1.2
//   gowalla_rec (29)                 1.1 1.2, 1.1 1.2, 0.9 1.0, 1.0 1.1
//   recommendation-like (31)         1.0 1.2, 1.1 1.2, 0.9 1.0, 1.0 1.1
//   artist-like (32)                 1.0 1.1, 1.0 1.0, 0.8 0.9, 0.9 1.0
//   proteins-like (597)              0.9 1.1, 0.8 1.0, 0.6 0.8, 0.8 1.0
//   products-like (50, 2.4M sources) 1.6, 1.6 and, where a list in an order of locality takes less, 1.2 1.4, 1.1 1.3
// and of smaller ones
//   tolokers (88, 1.04M)             1.3 1.4, 1.6 1.6, 1.2 1.3, 1.1 1.1
//   amazon_computers (36, 0.49M)     1.5 1.5, 1.5 1.4, 1.3 1.3, 1.3 1.3
//   fb15k237 (21, 0.31M)             1.3 1.3, 1.3 1.3, 1.1 1.1, 1.2 1.2
//   email_enron (10, 0.37M)          0.9 0.9, 0.9 0.9, 0.8 0.8, 0.8 0.8 (its hubs lie side by side)
//   proteins (3.7, 0.16M, even)      1.2 1.2, 1.2 1.2, 1.1 1.1, 1.1 1.1
//   cora (3.9, 10,556)               1.1 1.1, 1.1 1.1, 1.1 1.1, 1.1 1.0
bool pays(const SpmmCall& call) {
  const int64_t nnz = call.graph.nnz, rows = call.graph.num_rows, degree = nnz / rows;
  if (nnz < Config::few_nonzeros) {
    const bool even = rows <= Config::few_rows || call.work.longest <= Config::even_degree;
    return nnz > 0 && (degree >= Config::few_degree || (call.work.items && even));
  }
  if (nnz < Config::many_nonzeros) return true;
  const bool weighs = weight_of(call) != Weight::none;
  switch (call.num_feats) {
    case 3:
      return degree < (weighs ? 30 : 8);
    case 4:
      return degree < 32;
    default:
      return weighs || degree < (call.graph.num_cols >= Config::many_sources ? 128 : 40);
  }
}

// Calls f with the number of features as an integral constant.
template <typename F>
cudaError_t with_features(int64_t num_feats, F f) {
  switch (num_feats) {
    case 1:
      return f(std::integral_constant<int, 1>{});
    case 2:
      return f(std::integral_constant<int, 2>{});
    case 3:
      return f(std::integral_constant<int, 3>{});
    case 4:
      return f(std::integral_constant<int, 4>{});
  }
  return cudaErrorInvalidValue;
}

template <int D, Kind KIND, typename T, typename I>
cudaError_t launch(const Params<T, I>& p, cudaStream_t stream) {
  const int64_t blocks = p.cut_blocks + ceil_div(p.num_rows, Config::threads / p.lanes);
  narrow_kernel<T, I, D, KIND><<<static_cast<unsigned>(blocks), Config::threads, 0, stream>>>(p);
  if (p.cut_blocks) {
    join_kernel<T, I, D, KIND == Kind::fused><<<p.cut_blocks, Config::threads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace

SpmmCall spmm_of_edges(const SpmmCall& given) {
  SpmmCall call = given;
  call.message = Message::copy_lhs;
  call.graph.indices = given.graph.edge_ids;
  call.graph.edge_ids = nullptr;
  call.lhs = given.rhs;
  call.rhs = given.lhs;
  return call;
}

bool spmm_narrow_serves(const SpmmCall& call, bool of_edges) {
  const int64_t D = call.num_feats;
  const bool scales = call.message == Message::copy_lhs || (call.message == Message::mul && call.rhs.len == 1);
  const bool rows = call.lhs.data && call.lhs.div == 1 && call.lhs.len == D;
  if (call.extreme() || D > 4 || !scales || !rows) return false;
  // Else a sum of edges has one lane for each long row.
  if (!pays(call) && !(of_edges && call.graph.nnz >= Config::few_nonzeros)) return false;
  const int64_t bytes = row_alignment(D, size_of(call.dtype));
  return (reinterpret_cast<uintptr_t>(call.lhs.data) | reinterpret_cast<uintptr_t>(call.out)) % bytes == 0;
}

int64_t spmm_narrow_workspace_bytes(const SpmmCall& call) {
  return pieces_of(call) * (call.num_feats * accumulator_size(call.dtype) + 8);
}

cudaError_t spmm_narrow(const SpmmCall& call, cudaStream_t stream) {
  return with_types(call.dtype, call.graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p{};
    p.indptr = static_cast<const I*>(call.graph.indptr);
    p.indices = static_cast<const I*>(call.graph.indices);
    p.edge_ids = static_cast<const I*>(call.graph.edge_ids);
    p.num_rows = call.graph.num_rows;
    p.nnz = call.graph.nnz;
    p.source_scale = SourceScale<T, I>::of(call.fused);
    p.epilogue = Epilogue<T>::of(call.fused);
    p.x = static_cast<const T*>(call.lhs.data);
    p.rhs = call.rhs;
    p.out = static_cast<T*>(call.out);
    p.num_feats = call.num_feats;
    p.mean = call.reduce == Reduce::mean;
    p.empty_value = call.empty_value;
    p.lanes = lanes_of(call);
    const auto places = reinterpret_cast<uintptr_t>(p.indices) | reinterpret_cast<uintptr_t>(p.edge_ids);
    const auto bytes = [](int64_t size) {
      return static_cast<uintptr_t>(std::min<int64_t>(16, Config::in_flight * size));
    };
    p.in_runs = places % bytes(sizeof(I)) == 0 && reinterpret_cast<uintptr_t>(p.rhs.data) % bytes(sizeof(T)) == 0;
    p.cut_blocks = static_cast<unsigned>(ceil_div(pieces_of(call), Config::warps));
    p.cut = static_cast<I*>(call.workspace);
    p.parts.values = reinterpret_cast<Acc<T>*>(static_cast<char*>(call.workspace) + pieces_of(call) * 8);
    return with_features(p.num_feats, [&](auto feats) {
      switch (weight_of(call)) {
        case Weight::none:
          return p.indices ? launch<feats, Kind::none>(p, stream) : launch<feats, Kind::in_order>(p, stream);
        case Weight::fused:
          return launch<feats, Kind::fused>(p, stream);
        default:
          return launch<feats, Kind::scalar>(p, stream);
      }
    });
  });
}

}  // namespace cuda
}  // namespace gnnaccel
