// SpMM for every message, reduction, width and alignment: out[row] = reduce of message over the row's nonzeros.
//
// A worker is a group of threads that covers the features of one row, 16 bytes a thread where alignment allows.
// It takes one row of at most `chunk` nonzeros, gathers a few source rows at a time into registers and writes
// the result once. Longer rows (hubs) are cut at multiples of `chunk` in the nonzero array: one worker per
// piece, partial results in the workspace, combined in a fixed order by a second kernel, so there are no
// atomics, no zero fill, and the same bits on every run. A piece is found by a binary search in indptr, so a
// graph needs no preprocessing. Balancing over nonzeros: HP-SpMM (Fan et al.); one thread group of 16-byte
// lanes per row: Sputnik (Gale et al., 2020).
#include "spmm.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 256;
  static constexpr int batch = 4;  // gathers of a thread in flight before the first use
  // A tile of features is handled by one worker; wider rows take several passes (blockIdx.y). With 16-byte
  // lanes, 32 lanes are a slice of 512 bytes, whose source rows stay in L2 longer than whole rows would.
  static constexpr int max_lanes_wide = 32;
  static constexpr int max_lanes_narrow = 128;
  // Rows beyond `chunk` are cut. Small enough to spread a hub over the chip, large enough that the pieces
  // (at most two per chunk) stay small beside the features: see chunk_size.
  static constexpr int64_t min_chunk = 128;
  static constexpr int64_t max_chunk = 1024;
  static constexpr int64_t target_chunks = 32768;
  // A row of more pieces than this is combined by a whole block, of those that a block looks at.
  static constexpr int warp_pieces = 64;
  static constexpr int combined_rows = 64;
  static_assert(threads % 32 == 0 && max_lanes_narrow <= threads, "a worker lives in one block");
};

// The kernels of one message are held to the registers that let this many blocks share an SM; eight 64-bit positions
// beside eight values need more.
template <typename T, typename I, int MESSAGE>
constexpr int min_blocks = MESSAGE < 0                        ? 1
                           : sizeof(T) == 2 && sizeof(I) == 8 ? 3
                                                              : 4;

int64_t chunk_size(int64_t nnz) {
  int64_t chunk = next_power_of_two(nnz / Config::target_chunks);
  return chunk < Config::min_chunk ? Config::min_chunk : chunk > Config::max_chunk ? Config::max_chunk : chunk;
}

// No row can be cut if all nonzeros together make one chunk.
int64_t num_chunks(int64_t nnz) {
  int64_t chunk = chunk_size(nnz);
  return nnz <= chunk ? 0 : ceil_div(nnz, chunk);
}

template <typename T, typename I>
struct Params {
  const I* indptr;
  const I* indices;
  const I* edge_ids;
  SourceScale<T, I> source_scale;
  int64_t num_rows;
  int64_t nnz;
  Operand lhs;
  Operand rhs;
  T* out;
  I* arg_lhs;
  I* arg_rhs;
  int64_t num_feats;
  Message message;
  bool mean;
  Acc<T> sign;
  double empty_value;
  Epilogue<T> epilogue;
  int64_t chunk;
  int64_t num_chunks;
  Parts<T, I> parts;  // 2 * num_chunks: piece 0 of a chunk began before it, piece 1 inside
  int lanes;
};

// Kernels of one fixed message are named by its number, plus this where edge ids are given.
constexpr int kWithIds = 4;
// Those of any message by a negative one: as it is, or with what is fused.
constexpr int kAny = -1;
constexpr int kFused = -2;

// Takes nonzeros k .. k + Config::batch - 1 (FULL), or those of them before `end`.
template <typename T, typename I, int N, int MESSAGE, bool FULL, typename R>
__device__ __forceinline__ void take_batch(const Params<T, I>& p, const Reader<T, N>& lhs, const Reader<T, N>& rhs, I k,
                                           I end, R& to) {
  constexpr int batch = Config::batch;
  const Message message = MESSAGE >= 0 ? static_cast<Message>(MESSAGE & 3) : p.message;
  const bool with_ids = MESSAGE >= 0 ? (MESSAGE & kWithIds) != 0 : p.edge_ids != nullptr;
  const bool use_lhs = message != Message::copy_rhs;
  const bool use_rhs = message != Message::copy_lhs;
  I col[batch], edge[batch];
  Pack<T, N> x[batch], w[batch];
  Acc<T> scale[batch];
  if (!FULL) {  // or the compiler carries the last batch's values through, in registers and in local memory
#pragma unroll
    for (int u = 0; u < batch; ++u) {
      col[u] = edge[u] = 0;
      x[u].raw = w[u].raw = {};
      scale[u] = 0;
    }
  }
#pragma unroll
  for (int u = 0; u < batch; ++u) {
    if (!FULL && k + u >= end) continue;
    if (use_lhs) col[u] = __ldg(p.indices + k + u);
    if (use_rhs) edge[u] = with_ids ? __ldg(p.edge_ids + k + u) : k + u;
  }
#pragma unroll
  for (int u = 0; u < batch; ++u) {
    if (!FULL && k + u >= end) continue;
    if (use_lhs) lhs.fetch(col[u], x[u]);
    if (use_rhs) rhs.fetch(edge[u], w[u]);
    if (MESSAGE == kFused) scale[u] = p.source_scale[col[u]];
  }
#pragma unroll
  for (int u = 0; u < batch; ++u) {
    if (!FULL && k + u >= end) continue;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Acc<T> value;
      if (message == Message::copy_lhs) {
        value = lhs.value(x[u], i);
      } else if (message == Message::copy_rhs) {
        value = rhs.value(w[u], i);
      } else if (message == Message::mul) {
        value = lhs.value(x[u], i) * rhs.value(w[u], i);
      } else {
        value = lhs.value(x[u], i) + rhs.value(w[u], i);
      }
      if (MESSAGE == kFused) value *= scale[u];
      to.take(i, R::extreme ? value * p.sign : value, k + u);
    }
  }
}

// Reduces nonzeros begin .. end - 1 into `to`. MESSAGE >= 0 fixes the message at compile time, with a wide lhs
// and one rhs value for all of a thread's features.
template <typename T, typename I, int N, int MESSAGE, typename R>
__device__ __forceinline__ void accumulate(const Params<T, I>& p, const Reader<T, N>& lhs, const Reader<T, N>& rhs,
                                           I begin, I end, R& to) {
  I k = begin;
#pragma unroll 1  // twice the batch would cost the registers of two blocks
  for (; end - k >= Config::batch; k += Config::batch) take_batch<T, I, N, MESSAGE, true>(p, lhs, rhs, k, end, to);
  if (k < end) take_batch<T, I, N, MESSAGE, false>(p, lhs, rhs, k, end, to);
}

// Workers 0 .. num_chunks - 1 take the pieces of long rows inside their chunk, the others one short row each.
template <typename T, typename I, int N, int MESSAGE, bool EXTREME>
__global__ void __launch_bounds__(Config::threads, min_blocks<T, I, MESSAGE>) spmm_kernel(const Params<T, I> p) {
  const int workers = Config::threads / p.lanes;
  const int in_block = threadIdx.x / p.lanes;
  const int64_t worker = static_cast<int64_t>(blockIdx.x) * workers + in_block;
  const int64_t d = (static_cast<int64_t>(blockIdx.y) * p.lanes + threadIdx.x % p.lanes) * N;
  // Threads never meet again below (no barrier, no shuffle), so those without work leave at once.
  if (in_block >= workers || worker >= p.num_chunks + p.num_rows || d >= p.num_feats) return;
  Reader<T, N> lhs(p.lhs, d), rhs(p.rhs, d);
  if (MESSAGE >= 0) {  // said to the compiler, which then keeps no registers for the other case
    lhs.wide = true;
    rhs.wide = false;
  }
  const bool cutting = worker < p.num_chunks;
  const int64_t low = cutting ? worker * p.chunk : 0;
  const int64_t high = cutting && low + p.chunk < p.nnz ? low + p.chunk : p.nnz;
  int64_t row = cutting ? find_row(p.indptr, p.num_rows, low) : worker - p.num_chunks;
  for (;;) {
    const I begin = __ldg(p.indptr + row), end = __ldg(p.indptr + row + 1);
    if (cutting == (end - begin > p.chunk)) {
      const I from = begin > low ? begin : static_cast<I>(low), to = end < high ? end : static_cast<I>(high);
      Result<T, I, N, EXTREME> result;
      result.clear(from);
      accumulate<T, I, N, MESSAGE>(p, lhs, rhs, from, to, result);
      if (cutting) {
        result.write_part(p.parts, 2 * worker + (begin > low), d, p.num_feats);
      } else {
        result.template write<MESSAGE == kFused>(p, row, d, end - begin);
      }
    }
    // Behind the last row there may be nonzeros of none.
    if (!cutting || end >= high || row + 1 == p.num_rows) return;
    // A long row is longer than the chunk, so it holds the chunk's first or its last nonzero.
    row = find_row(p.indptr, p.num_rows, high - 1);
  }
}

// Merges the pieces first, first + step .. of one row, for one feature.
template <typename T, typename I, bool EXTREME>
__device__ __forceinline__ Combined<T, I, EXTREME> read_pieces(const Params<T, I>& p, int64_t begin, int64_t end,
                                                               int64_t d, int first, int step) {
  Combined<T, I, EXTREME> row;
  auto place = [&](int64_t c) { return (2 * c + (begin > c * p.chunk)) * p.num_feats + d; };
  row.read(p.parts, begin / p.chunk + first, (end - 1) / p.chunk + 1, int64_t{step}, place);
  return row;
}

// Threads look for rows that were cut, 32 features at a time (blockIdx.y). The warps of the block take the
// ones of few pieces in turn, and all together the others. Where there are fewer features, lanes share out the pieces.
// The list is in any order, but what is made of each row is not.
template <typename T, typename I, bool EXTREME>
__global__ void __launch_bounds__(Config::threads) combine_kernel(const Params<T, I> p) {
  constexpr int warps = Config::threads / 32;
  __shared__ int cut[Config::combined_rows];
  __shared__ int num_cut;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Config::combined_rows;
  if (threadIdx.x == 0) num_cut = 0;
  __syncthreads();
  if (threadIdx.x < Config::combined_rows && first + threadIdx.x < p.num_rows) {
    const I* own = p.indptr + first + threadIdx.x;
    if (own[1] - own[0] > p.chunk) cut[atomicAdd(&num_cut, 1)] = threadIdx.x;
  }
  __syncthreads();
  int width = 32;
  while (width / 2 >= p.num_feats) width /= 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, member = lane / width, members = 32 / width;
  const int64_t d = static_cast<int64_t>(blockIdx.y) * 32 + lane % width;
  for (int i = 0; i < num_cut; ++i) {
    const int64_t row = first + cut[i], begin = p.indptr[row], end = p.indptr[row + 1];
    const bool many = end - begin > Config::warp_pieces * p.chunk;
    if (!many && i % warps != warp) continue;
    Combined<T, I, EXTREME> result;
    const int at = many ? warp * members + member : member, step = many ? warps * members : members;
    if (d < p.num_feats) result = read_pieces<T, I, EXTREME>(p, begin, end, d, at, step);
    for (int apart = 16; apart >= width; apart /= 2) {
      const auto value = __shfl_xor_sync(~0u, result.value, apart);
      result.merge(value, __shfl_xor_sync(~0u, result.where, apart));
    }
    if (many) result.template merge_warps<warps>();
    if ((warp == 0 || !many) && member == 0 && d < p.num_feats) result.write(p, row, d, end - begin);
  }
}

template <typename T, typename I, int N, int MESSAGE, bool EXTREME>
cudaError_t launch(Params<T, I> p, cudaStream_t stream) {
  const int64_t vectors = ceil_div(p.num_feats, N);
  const int64_t tiles = ceil_div(vectors, N > 1 ? Config::max_lanes_wide : Config::max_lanes_narrow);
  p.lanes = static_cast<int>(ceil_div(vectors, tiles));
  const int64_t blocks = ceil_div(p.num_chunks + p.num_rows, Config::threads / p.lanes);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(tiles));
  spmm_kernel<T, I, N, MESSAGE, EXTREME><<<grid, Config::threads, 0, stream>>>(p);
  if (p.num_chunks) {
    const dim3 rows(static_cast<unsigned>(ceil_div(p.num_rows, Config::combined_rows)),
                    static_cast<unsigned>(ceil_div(p.num_feats, 32)));
    combine_kernel<T, I, EXTREME><<<rows, Config::threads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

// 16-byte lanes if every address allows it, and then, for max and min, a kernel of its own for the two messages that
// training spends its time on (copies, and one weight for all features of a thread): for graphs without a work list,
// whose sums are served by spmm_balanced. Else the kernel for any message.
template <typename T, typename I, bool EXTREME>
cudaError_t choose(const Params<T, I>& p, bool fused, cudaStream_t stream) {
  constexpr int n = 16 / sizeof(T);
  const bool wide = p.num_feats % n == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0 && fits(p.lhs, n, sizeof(T)) &&
                    fits(p.rhs, n, sizeof(T));
  if constexpr (!EXTREME) {
    if (fused && wide) return launch<T, I, n, kFused, false>(p, stream);
    if (fused) return launch<T, I, 1, kFused, false>(p, stream);
  }
  if (!wide) return launch<T, I, 1, kAny, EXTREME>(p, stream);
  if constexpr (EXTREME) {
    constexpr int copy = static_cast<int>(Message::copy_lhs), mul = static_cast<int>(Message::mul);
    const bool wide_lhs = p.lhs.data && p.lhs.div == 1 && p.lhs.len % n == 0;
    const bool wide_rhs = p.rhs.div == 1 && p.rhs.len % n == 0;
    if (wide_lhs && p.message == Message::copy_lhs) return launch<T, I, n, copy, true>(p, stream);
    if (wide_lhs && !wide_rhs && p.message == Message::mul) {
      return p.edge_ids ? launch<T, I, n, mul | kWithIds, true>(p, stream) : launch<T, I, n, mul, true>(p, stream);
    }
  }
  return launch<T, I, n, kAny, EXTREME>(p, stream);
}

}  // namespace

int64_t spmm_general_workspace_bytes(const SpmmCall& call) {
  return 2 * num_chunks(call.graph.nnz) * call.num_feats *
         call.part_bytes(call.graph.index_type == IndexType::i64 ? 8 : 4);
}

cudaError_t spmm_general(const SpmmCall& call, cudaStream_t stream) {
  const Csr& graph = call.graph;
  return with_types(call.dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p{};
    p.indptr = static_cast<const I*>(graph.indptr);
    p.indices = static_cast<const I*>(graph.indices);
    p.edge_ids = static_cast<const I*>(graph.edge_ids);
    p.num_rows = graph.num_rows;
    p.nnz = graph.nnz;
    p.source_scale = SourceScale<T, I>::of(call.fused);
    p.epilogue = Epilogue<T>::of(call.fused);
    p.lhs = call.lhs;
    p.rhs = call.rhs;
    p.out = static_cast<T*>(call.out);
    p.arg_lhs = static_cast<I*>(call.arg_lhs);
    p.arg_rhs = static_cast<I*>(call.arg_rhs);
    p.num_feats = call.num_feats;
    p.message = call.message;
    p.mean = call.reduce == Reduce::mean;
    p.sign = call.reduce == Reduce::min ? -1 : 1;
    p.empty_value = call.empty_value;
    p.chunk = chunk_size(graph.nnz);
    p.num_chunks = num_chunks(graph.nnz);
    p.parts.values = static_cast<Acc<T>*>(call.workspace);
    p.parts.where = reinterpret_cast<I*>(p.parts.values + 2 * p.num_chunks * p.num_feats);
    return call.extreme() ? choose<T, I, true>(p, false, stream) : choose<T, I, false>(p, !call.fused.empty(), stream);
  });
}

}  // namespace cuda
}  // namespace gnnaccel
