// Sums of features that are no whole number of 16-byte vectors (41 classes), or lie at other addresses, for kernels
// that gather nothing else: each head of the sources is padded to one in the workspace. Along a list the sum goes to
// out from there; else, and where heads have weights of their own, it is taken in the workspace too, and what is no
// padding goes to out.
#include "spmm.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kAlignment = 256;
constexpr int64_t kMostBytes = int64_t{8} << 30;  // of copies, which a sum of less memory should not fail for
// Nonzeros for each source from which on copies of the sources pay: in rows of a line and so few bytes in all that they
// stay in L2 beside the sources and the results, and in others. H100, along a list as given and with a copy, 10
// features: gowalla_rec (29) 34 and 31 us, artist-like (32) 28 and 25, arxiv-like (14) 45 and 48; 31: artist-like 47
// and 39, recommendation-like (31, 20 MB) weighted 163 and 176; 41: proteins-like (597) 2.37 and 1.77 ms; 47:
// products-like (50) 10.7 and 8.6.
constexpr int64_t kNarrowDegree = 20, kWideDegree = 45, kCachedBytes = 12 << 20;

int64_t round_up(int64_t count, int64_t multiple) { return ceil_div(count, multiple) * multiple; }

int64_t index_size(const Csr& graph) { return graph.index_type == IndexType::i64 ? 8 : 4; }

bool weighs_heads(const SpmmCall& call) { return call.message == Message::mul && call.rhs.len != 1; }

// Features of a head: those that share one weight.
int64_t head_of(const SpmmCall& call) { return weighs_heads(call) ? call.rhs.div : call.lhs.len; }

// Those, padded: to whole vectors, and on to halves of cache lines where these are not much more. A row of 41 floats
// lies in 2.25 lines on average if it takes 176 bytes, in 2 if it takes 192 (H200, reddit-like: a ninth of the time).
int64_t padded_head(int64_t kept, int64_t size) {
  const int64_t vectors = round_up(kept, 16 / size), halves = round_up(kept, 64 / size);
  return 8 * halves <= 9 * vectors ? halves : vectors;
}

// True if the sum of padded sources, with both copies, takes less time than that of one value at a time (spmm_general)
// and what it saves is more than two launches. H200: from 1.3 times as fast at 4 bytes to 4.4 at 2408 (6.5 in 16 bits)
// by work lists at degrees of 12 and more; without a list 0.3 to 1.0 where few lanes have features, or little is read
// (docs/kernels.md).
bool is_profitable(const SpmmCall& call, bool listed) {
  const Csr& graph = call.graph;
  const int64_t size = size_of(call.dtype), kept = head_of(call), ends = graph.num_rows + graph.num_cols;
  const int64_t read = graph.nnz * call.lhs.len * size;
  if (graph.nnz < ends || (weighs_heads(call) && padded_head(kept, size) > 2 * kept)) return false;
  if (listed) return read >= 4 << 20 && (graph.nnz >= 4 * ends || kept * size > 12);
  return read >= 32 << 20 && padded_head(kept, size) * size >= 32;
}

// The scales of sources that are multiplied in on the way, once for each source instead of each nonzero: not those of
// 16-bit features, which that would round.
Fused scales_of(const SpmmCall& call) {
  Fused scales{};
  if (size_of(call.dtype) > 2) {
    scales.source_scale = call.fused.source_scale;
    scales.source_indptr = call.fused.source_indptr;
  }
  return scales;
}

// Writes the vector that begins with value `first` of `count`, where a row has `width`: value(row, d) each.
template <typename T, typename K, typename F>
__device__ __forceinline__ void write_vector(T* to, K first, K count, uint32_t width, F value) {
  constexpr int N = 16 / sizeof(T);
  K row = first / width;
  uint32_t d = static_cast<uint32_t>(first - row * width);
  Pack<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (first + i < count) out.values[i] = value(row, d);
    if (++d == width) ++row, d = 0;
  }
  if (count - first >= N) return store(to + first, out);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (first + i < count) to[first + i] = out.values[i];
  }
}

// to [heads, wide] = x [heads, kept] * scale [heads], 0 where x has nothing.
template <typename T, typename I, typename K>
__global__ void __launch_bounds__(kThreads)
    pad_kernel(const T* x, T* to, K count, uint32_t kept, uint32_t wide, SourceScale<T, I> scale) {
  const K first = (static_cast<K>(blockIdx.x) * kThreads + threadIdx.x) * (16 / sizeof(T));
  if (first >= count) return;
  write_vector(to, first, count, wide, [&](K head, uint32_t d) {
    if (d >= kept) return narrow<T>(0);
    return narrow<T>(scale[static_cast<I>(head)] * load_one(x + static_cast<int64_t>(head) * kept + d));
  });
}

// to [heads, kept] = the first of each row of x [heads, wide].
template <typename T, typename K>
__global__ void __launch_bounds__(kThreads) unpad_kernel(const T* x, T* to, K count, uint32_t kept, uint32_t wide) {
  const K first = (static_cast<K>(blockIdx.x) * kThreads + threadIdx.x) * (16 / sizeof(T));
  if (first >= count) return;
  write_vector(to, first, count, kept,
               [&](K head, uint32_t d) { return __ldg(x + static_cast<int64_t>(head) * wide + d); });
}

// Calls f with `count`, in 32 bits where these have room, and the blocks for as many values of `size` bytes.
template <typename F>
cudaError_t with_count(int64_t count, int64_t size, F f) {
  const unsigned blocks = static_cast<unsigned>(ceil_div(count, 16 / size * kThreads));
  if (count == 0) return cudaSuccess;
  if (count < INT32_MAX) {
    f(static_cast<uint32_t>(count), blocks);
  } else {
    f(static_cast<uint64_t>(count), blocks);
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t unpad(const void* x, void* to, int64_t heads, uint32_t kept, uint32_t wide, cudaStream_t stream) {
  return with_count(heads * kept, sizeof(T), [&](auto count, unsigned blocks) {
    unpad_kernel<T, decltype(count)>
        <<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(x), static_cast<T*>(to), count, kept, wide);
  });
}

// Bytes that a row of `bytes` takes where it is copied anyway: whole lines, or halves of them, where these are not much
// more than whole vectors, and no row of less than a line lies in two.
int64_t padded_row(int64_t bytes) {
  const int64_t vectors = round_up(bytes, 16), halves = round_up(bytes, 64), lines = round_up(bytes, 128);
  if (bytes <= 64) return next_power_of_two(vectors);
  if (16 * lines <= 17 * vectors) return lines;
  return 8 * halves <= 9 * vectors ? halves : vectors;
}

}  // namespace

SpmmCall with_padded_sources(const SpmmCall& given, int64_t& bytes) {
  constexpr int64_t least_nonzeros = 1000000;  // with fewer one launch more is much
  constexpr int64_t most_new_bytes = int64_t{2} << 30;
  const Csr& graph = given.graph;
  const int64_t size = size_of(given.dtype), kept = given.lhs.len, wide = padded_row(kept * size) / size;
  const bool fits = kept * size % 16 == 0 && reinterpret_cast<uintptr_t>(given.lhs.data) % 16 == 0;
  const bool whole = given.lhs.data && given.lhs.div == 1 && kept == given.num_feats && !weighs_heads(given);
  bytes = 0;
  if (fits || !whole || wide == kept || !given.work.items) return given;
  if (given.message != Message::copy_lhs && given.message != Message::mul) return given;
  const int64_t taken = round_up(graph.num_cols * wide * size, kAlignment);
  const bool often = graph.nnz >= kReadOften * (graph.num_rows + graph.num_cols) && is_profitable(given, true);
  const int64_t degree = graph.nnz / graph.num_cols;
  const bool narrow = wide * size <= 128 && taken <= kCachedBytes;
  const bool pays = graph.nnz >= least_nonzeros && degree >= (narrow ? kNarrowDegree : kWideDegree);
  if (taken > (often ? kMostBytes : most_new_bytes) || !(often || pays)) return given;
  SpmmCall call = given;
  call.lhs.len = wide;
  call.lhs.data = given.workspace;
  call.workspace = static_cast<char*>(given.workspace) + taken;
  if (scales_of(given).scales_sources()) call.fused.source_scale = call.fused.source_indptr = nullptr;
  bytes = taken;
  return call;
}

SpmmCall padded(const SpmmCall& given, bool listed, int64_t& bytes) {
  const Csr& graph = given.graph;
  const int64_t size = size_of(given.dtype), kept = head_of(given), wide = padded_head(kept, size);
  bytes = 0;
  if (given.lhs.div != 1 || given.lhs.len % kept || given.num_feats % given.lhs.len) return given;
  if (!is_profitable(given, listed) || (weighs_heads(given) && !given.fused.empty())) return given;
  auto room = [&](int64_t wanted) {
    void* at = static_cast<char*>(given.workspace) + bytes;
    bytes += round_up(wanted, kAlignment);
    return at;
  };
  SpmmCall call = given;
  call.num_feats = given.num_feats / kept * wide;
  call.lhs.len = given.lhs.len / kept * wide;
  if (weighs_heads(given)) call.rhs.div = wide;
  call.lhs.data = room(graph.num_cols * call.lhs.len * size);
  call.out = room(graph.num_rows * call.num_feats * size);
  if (given.extreme()) {
    const int64_t argmax = graph.num_rows * call.num_feats * index_size(graph);
    void *sources = room(argmax), *edges = room(argmax);
    if (given.arg_lhs) call.arg_lhs = sources;
    if (given.arg_rhs) call.arg_rhs = edges;
  }
  if (given.fused.bias) call.fused.bias = room(call.num_feats * size);
  if (scales_of(given).scales_sources()) call.fused.source_scale = call.fused.source_indptr = nullptr;
  call.workspace = room(0);
  if (bytes <= kMostBytes) return call;
  bytes = 0;
  return given;
}

cudaError_t spmm_pad(const SpmmCall& given, const SpmmCall& call, cudaStream_t stream) {
  return with_types(call.dtype, call.graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    const uint32_t kept = static_cast<uint32_t>(head_of(given)), wide = static_cast<uint32_t>(head_of(call));
    auto pad = [&](const void* x, const void* to, int64_t heads, const Fused& scales) {
      const SourceScale<T, I> scale = SourceScale<T, I>::of(scales);
      return with_count(heads * wide, sizeof(T), [&](auto count, unsigned blocks) {
        pad_kernel<T, I, decltype(count)><<<blocks, kThreads, 0, stream>>>(
            static_cast<const T*>(x), static_cast<T*>(const_cast<void*>(to)), count, kept, wide, scale);
      });
    };
    const int64_t heads = call.graph.num_cols * (call.lhs.len / wide);
    const cudaError_t status = pad(given.lhs.data, call.lhs.data, heads, scales_of(given));
    if (status != cudaSuccess || call.fused.bias == given.fused.bias) return status;
    return pad(given.fused.bias, call.fused.bias, call.num_feats / wide, {});
  });
}

cudaError_t spmm_unpad(const SpmmCall& given, const SpmmCall& call, cudaStream_t stream) {
  if (call.out == given.out) return cudaSuccess;
  const uint32_t kept = static_cast<uint32_t>(head_of(given)), wide = static_cast<uint32_t>(head_of(call));
  const int64_t heads = given.graph.num_rows * (given.num_feats / kept);
  auto take = [&](const void* x, void* to, int64_t size) {
    if (!to) return cudaSuccess;
    return size == 2   ? unpad<uint16_t>(x, to, heads, kept, wide, stream)
           : size == 4 ? unpad<uint32_t>(x, to, heads, kept, wide, stream)
                       : unpad<uint64_t>(x, to, heads, kept, wide, stream);
  };
  cudaError_t status = take(call.out, given.out, size_of(given.dtype));
  if (status == cudaSuccess) status = take(call.arg_lhs, given.arg_lhs, index_size(given.graph));
  return status == cudaSuccess ? take(call.arg_rhs, given.arg_rhs, index_size(given.graph)) : status;
}

}  // namespace cuda
}  // namespace gnnaccel
