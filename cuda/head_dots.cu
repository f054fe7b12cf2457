// Inner products of every row's heads with one or two vectors, the node scores of additive attention, and their
// gradients. Memory-bound: x is read once for both vectors, forward and backward.
//
// Forward a group of lanes takes a head of a row. Backward a thread keeps 16 bytes of columns of a block's rows, every
// so-manyeth of them, and with them its share of grad_vectors; shares meet in shared memory, those of blocks in a
// second kernel, all in a fixed order.
#include "shares.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 256;
  static constexpr int max_vectors = 2;
};

template <typename T>
struct Params {
  const T* x;             // [rows, width]
  const Acc<T>* vectors;  // [V, width]
  const Acc<T>* grad;     // [V, rows, heads]
  Acc<T>* out;            // [V, rows, heads]
  T* grad_x;              // [rows, width]
  Acc<T>* grad_vectors;   // [V, width]
  Acc<T>* shares;         // [blocks, V, width]
  int64_t num_rows;
  int64_t rows_of_block;
  int heads;
  int per_head;
  int width;
  int columns;  // threads of a block side by side, backward
  bool add;     // to what grad_x has
};

// N values, by loads of 16 bytes at most.
template <typename A, int N>
__device__ __forceinline__ void load_all(const A* from, A (&to)[N]) {
  constexpr int few = N * sizeof(A) > 16 ? 16 / static_cast<int>(sizeof(A)) : N;
#pragma unroll
  for (int i = 0; i < N; i += few) {
    Pack<A, few> pack;
    load(from + i, pack);
#pragma unroll
    for (int j = 0; j < few; ++j) to[i + j] = pack.values[j];
  }
}

template <typename T, int N, int V>
__global__ void __launch_bounds__(Config::threads) forward_kernel(const Params<T> p, int lanes) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (Config::threads / lanes) + threadIdx.x / lanes;
  const int64_t count = p.num_rows * p.heads;
  const int head = static_cast<int>(i % p.heads) * p.per_head;
  Acc<T> sum[V] = {};
  for (int d = threadIdx.x % lanes * N; i < count && d < p.per_head; d += lanes * N) {
    Pack<T, N> x;
    Acc<T> vector[N];
    load(p.x + i * p.per_head + d, x);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      load_all(p.vectors + v * p.width + head + d, vector);
#pragma unroll
      for (int n = 0; n < N; ++n) sum[v] += widen(x.values[n]) * vector[n];
    }
  }
  for (int step = lanes / 2; step; step /= 2) {
#pragma unroll
    for (int v = 0; v < V; ++v) sum[v] += __shfl_xor_sync(~0u, sum[v], step);
  }
  if (i >= count || threadIdx.x % lanes) return;
#pragma unroll
  for (int v = 0; v < V; ++v) p.out[v * count + i] = sum[v];
}

template <typename T, int N, int V>
__global__ void __launch_bounds__(Config::threads) backward_kernel(const Params<T> p) {
  using A = Acc<T>;
  __shared__ A shared[Config::threads][V * N];
  const int column = threadIdx.x % p.columns, member = threadIdx.x / p.columns, members = Config::threads / p.columns;
  const int d = (static_cast<int>(blockIdx.y) * p.columns + column) * N;
  const bool active = d < p.width;
  const int head = active ? d / p.per_head : 0;
  A vector[V][N], share[V * N];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    load_all(p.vectors + v * p.width + (active ? d : 0), vector[v]);
#pragma unroll
    for (int n = 0; n < N; ++n) share[v * N + n] = 0;
  }
  const int64_t begin = blockIdx.x * p.rows_of_block;
  const int64_t end = begin + p.rows_of_block < p.num_rows ? begin + p.rows_of_block : p.num_rows;
#pragma unroll 4
  for (int64_t row = begin + member; active && row < end; row += members) {
    Pack<T, N> x, to;
    load(p.x + row * p.width + d, x);
    A sum[N] = {};
    if (p.add) {
      Pack<T, N> before;
      before.raw = *reinterpret_cast<const typename Pack<T, N>::Raw*>(p.grad_x + row * p.width + d);
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n] = widen(before.values[n]);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const A grad = __ldg(p.grad + (v * p.num_rows + row) * p.heads + head);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        share[v * N + n] += grad * widen(x.values[n]);
        sum[n] += grad * vector[v][n];
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) to.values[n] = narrow<T>(sum[n]);
    store(p.grad_x + row * p.width + d, to);
  }
  sum_members(shared, share, p.columns, [&](int of, int i, A value) {
    const int at = (static_cast<int>(blockIdx.y) * p.columns + of) * N + i % N;
    if (at < p.width) p.shares[(static_cast<int64_t>(blockIdx.x) * V + i / N) * p.width + at] = value;
  });
}

template <typename T>
Params<T> params_of(const void* x, const void* vectors, int64_t num_rows, int64_t num_heads, int64_t width) {
  Params<T> p{};
  p.x = static_cast<const T*>(x);
  p.vectors = static_cast<const Acc<T>*>(vectors);
  p.num_rows = num_rows;
  p.heads = static_cast<int>(num_heads);
  p.per_head = static_cast<int>(width / num_heads);
  p.width = static_cast<int>(width);
  return p;
}

// Calls f(vector length, number of vectors) as constants: 16 bytes where heads and `pointers` allow it.
template <typename T, typename F>
cudaError_t with_sizes(const Params<T>& p, uintptr_t pointers, int64_t num_vectors, F f) {
  using std::integral_constant;
  if (num_vectors < 1 || num_vectors > Config::max_vectors) return cudaErrorInvalidValue;
  constexpr int wide = 16 / sizeof(T);
  auto with_length = [&](auto length) {
    return num_vectors == 1 ? f(length, integral_constant<int, 1>{}) : f(length, integral_constant<int, 2>{});
  };
  if (p.per_head % wide || pointers % 16) return with_length(integral_constant<int, 1>{});
  return with_length(integral_constant<int, wide>{});
}

uintptr_t bits(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

cudaError_t head_dots(const void* x, const void* vectors, void* out, int64_t num_rows, int64_t num_vectors,
                      int64_t num_heads, int64_t width, DType dtype, cudaStream_t stream) {
  if (num_rows == 0 || width == 0) return cudaSuccess;
  return with_types(dtype, IndexType::i32, [&](auto value, auto) {
    using T = decltype(value);
    Params<T> p = params_of<T>(x, vectors, num_rows, num_heads, width);
    p.out = static_cast<Acc<T>*>(out);
    return with_sizes(p, bits(x) | bits(vectors), num_vectors, [&](auto length, auto count) {
      const int64_t wanted = next_power_of_two(ceil_div(p.per_head, length));
      const int lanes = static_cast<int>(wanted < 32 ? wanted : 32);
      const unsigned blocks = static_cast<unsigned>(ceil_div(num_rows * num_heads, Config::threads / lanes));
      forward_kernel<T, length, count><<<blocks, Config::threads, 0, stream>>>(p, lanes);
      return cudaGetLastError();
    });
  });
}

cudaError_t head_dots_backward(Workspace& workspace, const void* x, const void* vectors, const void* grad_out,
                               void* grad_x, void* grad_vectors, bool add, int64_t num_rows, int64_t num_vectors,
                               int64_t num_heads, int64_t width, DType dtype, cudaStream_t stream) {
  if (num_rows == 0 || width == 0) return cudaSuccess;
  void* const scratch = workspace.take(blocks_of_rows(num_rows) * num_vectors * width * accumulator_size(dtype));
  return with_types(dtype, IndexType::i32, [&](auto value, auto) {
    using T = decltype(value);
    Params<T> p = params_of<T>(x, vectors, num_rows, num_heads, width);
    p.grad = static_cast<const Acc<T>*>(grad_out);
    p.grad_x = static_cast<T*>(grad_x);
    p.grad_vectors = static_cast<Acc<T>*>(grad_vectors);
    p.shares = static_cast<Acc<T>*>(scratch);
    p.add = add;
    const int64_t blocks = blocks_of_rows(num_rows);
    p.rows_of_block = ceil_div(num_rows, blocks);
    return with_sizes(p, bits(x) | bits(vectors) | bits(grad_x), num_vectors, [&](auto length, auto count) {
      const int64_t wanted = next_power_of_two(ceil_div(p.width, length));
      p.columns = static_cast<int>(wanted < Config::threads ? wanted : Config::threads);
      const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ceil_div(p.width, p.columns * length)));
      backward_kernel<T, length, count><<<grid, Config::threads, 0, stream>>>(p);
      return sum_shares(p.shares, p.grad_vectors, static_cast<int>(num_vectors) * p.width, blocks, stream);
    });
  });
}

}  // namespace cuda
}  // namespace gnnaccel
