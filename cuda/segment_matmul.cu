// Products of rows with the matrix of their segment, and the gradient of the matrices: one launch for all segments,
// which finds its way by the offsets on the device. A "segment" is of rows; weights may be block-diagonal, of `heads`
// blocks.
//
// Tiles of rows are numbered without a prefix sum: those of segment s begin at ptr[s] / tile + s, rounded down, which
// leaves each segment at least as many numbers as it has tiles; the others have nothing to do.
//
// A block takes a tile of the result, which its threads hold in registers, and walks along the sums in steps that it
// brings to shared memory, the next one on its way meanwhile. f32 is multiplied as f32: no tensor cores. The gradient
// of a matrix is a sum over the rows of its segment, cut into parts that blocks add up and a second kernel adds, in a
// fixed order.
#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 256;
  static constexpr int rows = 128;     // of a tile of the product,
  static constexpr int columns = 64;   // and its columns
  static constexpr int step = 16;      // along a sum
  static constexpr int side = 64;      // of a tile of the matrices' gradient
  static constexpr int wide = 4;       // columns of a thread: threads lie 16 by 16
  static constexpr int blocks = 1024;  // wanted for the matrices' gradient
  static constexpr int min_part = 128;
  static constexpr int max_part = 4096;  // rows that f32 adds up before f64 does
};
static_assert(Config::columns == 16 * Config::wide && Config::side == 16 * Config::wide, "16 by 16 threads");
static_assert(Config::rows % 16 == 0 && Config::threads == 256, "16 by 16 threads");

template <typename T>
struct Params {
  const T* x;          // [rows, heads * inner]
  const int64_t* ptr;  // [segments + 1]
  const T* weight;     // [segments, heads, inner, outer], or transposed: [.., outer, inner]
  const T* grad;       // [rows, heads * outer]
  T* out;              // [rows, heads * outer], or [segments, heads, inner, outer]
  Acc<T>* shares;      // [parts, heads, inner, outer]
  int64_t num_rows;
  int64_t part;  // rows
  int segments;
  int heads;
  int inner;
  int outer;
};

// Rows begin .. end - 1 of a segment; none: begin >= end.
struct Piece {
  int segment;
  int64_t begin;
  int64_t end;
};

__device__ __forceinline__ Piece find_piece(const int64_t* ptr, int segments, int64_t number, int64_t size) {
  int low = 0, high = segments;  // the last segment whose numbers do not begin behind `number`
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (__ldg(ptr + middle) / size + middle <= number) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t first = __ldg(ptr + low), last = __ldg(ptr + low + 1);
  const int64_t begin = first + (number - (first / size + low)) * size;
  return {low, begin, begin + size < last ? begin + size : last};
}

// N neighbours of a row of `width` values, 0 where there are none.
template <typename T, int N>
__device__ __forceinline__ void fetch(const T* row, int d, int width, bool inside, Acc<T>* to) {
  Pack<T, N> from;
  const bool read = inside && d < width;
  if (read) load(row + d, from);
#pragma unroll
  for (int n = 0; n < N; ++n) to[n] = read ? widen(from.values[n]) : Acc<T>(0);
}

template <typename T, int N, bool Turned>
__global__ void __launch_bounds__(Config::threads) product_kernel(const Params<T> p) {
  using A = Acc<T>;
  constexpr int rows = Config::rows, columns = Config::columns, step = Config::step, wide = Config::wide;
  constexpr int tall = rows / 16, of_x = rows * step / Config::threads, of_w = columns * step / Config::threads;
  alignas(16) __shared__ A xs[step][rows + 4];  // the rest spares writes of a column the same bank
  alignas(16) __shared__ A ws[step][columns + 4];
  const Piece piece = find_piece(p.ptr, p.segments, blockIdx.x, rows);
  if (piece.begin >= piece.end) return;
  const int across = (p.outer + columns - 1) / columns, i = threadIdx.x;
  const int head = static_cast<int>(blockIdx.y) / across, column = static_cast<int>(blockIdx.y) % across * columns;
  const T* const x = p.x + piece.begin * p.heads * p.inner + head * p.inner;
  const T* const weight = p.weight + (static_cast<int64_t>(piece.segment) * p.heads + head) * p.inner * p.outer;
  const int count = static_cast<int>(piece.end - piece.begin);
  A next_x[of_x], next_w[of_w], sum[tall][wide] = {};

  const auto fetch_step = [&](int k) {
#pragma unroll
    for (int j = 0; j < of_x / N; ++j) {
      const int e = i + j * Config::threads, row = e / (step / N), d = k + e % (step / N) * N;
      fetch<T, N>(x + static_cast<int64_t>(row) * p.heads * p.inner, d, p.inner, row < count, next_x + j * N);
    }
#pragma unroll
    for (int j = 0; j < of_w / N; ++j) {
      const int e = i + j * Config::threads;
      if constexpr (Turned) {
        const int c = column + e / (step / N), d = k + e % (step / N) * N;
        fetch<T, N>(weight + static_cast<int64_t>(c) * p.inner, d, p.inner, c < p.outer, next_w + j * N);
      } else {
        const int d = k + e / (columns / N), c = column + e % (columns / N) * N;
        fetch<T, N>(weight + static_cast<int64_t>(d) * p.outer, c, p.outer, d < p.inner, next_w + j * N);
      }
    }
  };
  const auto keep_step = [&] {
#pragma unroll
    for (int j = 0; j < of_x; ++j) {
      const int e = i + j / N * Config::threads;
      xs[e % (step / N) * N + j % N][e / (step / N)] = next_x[j];
    }
#pragma unroll
    for (int j = 0; j < of_w; ++j) {
      const int e = i + j / N * Config::threads;
      if constexpr (Turned) {
        ws[e % (step / N) * N + j % N][e / (step / N)] = next_w[j];
      } else {
        ws[e / (columns / N)][e % (columns / N) * N + j % N] = next_w[j];
      }
    }
  };

  const int row = i / 16 * tall, c = i % 16 * wide;
  fetch_step(0);
  for (int k = 0; k < p.inner; k += step) {
    keep_step();
    __syncthreads();
    if (k + step < p.inner) fetch_step(k + step);
#pragma unroll
    for (int s = 0; s < step; ++s) {
      A left[tall], right[wide];
#pragma unroll
      for (int r = 0; r < tall; ++r) left[r] = xs[s][row + r];
#pragma unroll
      for (int n = 0; n < wide; ++n) right[n] = ws[s][c + n];
#pragma unroll
      for (int r = 0; r < tall; ++r) {
#pragma unroll
        for (int n = 0; n < wide; ++n) sum[r][n] += left[r] * right[n];
      }
    }
    __syncthreads();
  }
  T* const out = p.out + piece.begin * p.heads * p.outer + head * p.outer;
#pragma unroll
  for (int r = 0; r < tall; ++r) {
    T* const to = out + static_cast<int64_t>(row + r) * p.heads * p.outer;
#pragma unroll
    for (int n = 0; n < wide; ++n) {
      if (row + r < count && column + c + n < p.outer) to[column + c + n] = narrow<T>(sum[r][n]);
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(Config::threads) shares_kernel(const Params<T> p) {
  using A = Acc<T>;
  constexpr int side = Config::side, step = Config::step, wide = Config::wide, each = side * step / Config::threads;
  alignas(16) __shared__ A xs[step][side];
  alignas(16) __shared__ A gs[step][side];
  const Piece piece = find_piece(p.ptr, p.segments, blockIdx.x, p.part);
  if (piece.begin >= piece.end) return;
  const int across = (p.outer + side - 1) / side, tiles = (p.inner + side - 1) / side * across, i = threadIdx.x;
  const int head = static_cast<int>(blockIdx.y) / tiles, tile = static_cast<int>(blockIdx.y) % tiles;
  const int top = tile / across * side, left = tile % across * side;
  const T* const x = p.x + head * p.inner;
  const T* const grad = p.grad + head * p.outer;
  A next_x[each], next_g[each], sum[wide][wide] = {};

  const auto fetch_step = [&](int64_t first) {
#pragma unroll
    for (int j = 0; j < each / N; ++j) {
      const int e = i + j * Config::threads, d = e % (side / N) * N;
      const int64_t row = first + e / (side / N);
      fetch<T, N>(x + row * p.heads * p.inner, top + d, p.inner, row < piece.end, next_x + j * N);
      fetch<T, N>(grad + row * p.heads * p.outer, left + d, p.outer, row < piece.end, next_g + j * N);
    }
  };

  const int a = i / 16 * wide, b = i % 16 * wide;
  fetch_step(piece.begin);
  for (int64_t first = piece.begin; first < piece.end; first += step) {
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const int e = i + j / N * Config::threads;
      xs[e / (side / N)][e % (side / N) * N + j % N] = next_x[j];
      gs[e / (side / N)][e % (side / N) * N + j % N] = next_g[j];
    }
    __syncthreads();
    if (first + step < piece.end) fetch_step(first + step);
#pragma unroll
    for (int s = 0; s < step; ++s) {
      A of_x[wide], of_g[wide];
#pragma unroll
      for (int n = 0; n < wide; ++n) {
        of_x[n] = xs[s][a + n];
        of_g[n] = gs[s][b + n];
      }
#pragma unroll
      for (int m = 0; m < wide; ++m) {
#pragma unroll
        for (int n = 0; n < wide; ++n) sum[m][n] += of_x[m] * of_g[n];
      }
    }
    __syncthreads();
  }
  A* const share = p.shares + (static_cast<int64_t>(blockIdx.x) * p.heads + head) * p.inner * p.outer;
#pragma unroll
  for (int m = 0; m < wide; ++m) {
#pragma unroll
    for (int n = 0; n < wide; ++n) {
      const int d = top + a + m, c = left + b + n;
      if (d < p.inner && c < p.outer) share[static_cast<int64_t>(d) * p.outer + c] = sum[m][n];
    }
  }
}

// One value of a segment's matrices to a thread.
template <typename T>
__global__ void __launch_bounds__(Config::threads) sum_kernel(const Params<T> p, int64_t values) {
  const int64_t i = static_cast<int64_t>(blockIdx.y) * Config::threads + threadIdx.x;
  if (i >= values) return;
  const int64_t segment = blockIdx.x;
  const int64_t begin = __ldg(p.ptr + segment), end = __ldg(p.ptr + segment + 1);
  const Acc<T>* share = p.shares + (begin / p.part + segment) * values + i;
  const int64_t parts = (end - begin + p.part - 1) / p.part;
  double sum = 0;
#pragma unroll 8
  for (int64_t k = 0; k < parts; ++k) sum += share[k * values];
  p.out[segment * values + i] = narrow<T>(static_cast<Acc<T>>(sum));
}

template <typename T>
Params<T> params_of(const void* x, const void* ptr, int64_t num_rows, int64_t num_segments, int64_t num_heads,
                    int64_t inner, int64_t outer) {
  Params<T> p{};
  p.x = static_cast<const T*>(x);
  p.ptr = static_cast<const int64_t*>(ptr);
  p.num_rows = num_rows;
  p.segments = static_cast<int>(num_segments);
  p.heads = static_cast<int>(num_heads);
  p.inner = static_cast<int>(inner);
  p.outer = static_cast<int>(outer);
  return p;
}

// f(how many values are read at once) as a constant.
template <typename T, typename F>
cudaError_t with_length(int64_t inner, int64_t outer, const void* one, const void* other, F f) {
  constexpr int most = sizeof(T) == 8 ? 2 : 4;
  const uintptr_t bits = reinterpret_cast<uintptr_t>(one) | reinterpret_cast<uintptr_t>(other);
  if (inner % most || outer % most || bits % 16) return f(std::integral_constant<int, 1>{});
  return f(std::integral_constant<int, most>{});
}

}  // namespace

cudaError_t segment_matmul(const void* x, const void* ptr, const void* weight, void* out, int64_t num_rows,
                           int64_t num_segments, int64_t num_heads, int64_t inner, int64_t outer, bool transposed,
                           DType dtype, cudaStream_t stream) {
  if (num_rows == 0 || outer == 0) return cudaSuccess;
  return with_types(dtype, IndexType::i32, [&](auto value, auto) {
    using T = decltype(value);
    Params<T> p = params_of<T>(x, ptr, num_rows, num_segments, num_heads, inner, outer);
    p.weight = static_cast<const T*>(weight);
    p.out = static_cast<T*>(out);
    const dim3 grid(static_cast<unsigned>(num_rows / Config::rows + num_segments),
                    static_cast<unsigned>(ceil_div(outer, Config::columns) * num_heads));
    return with_length<T>(inner, outer, x, weight, [&](auto length) {
      if (transposed) {
        product_kernel<T, length, true><<<grid, Config::threads, 0, stream>>>(p);
      } else {
        product_kernel<T, length, false><<<grid, Config::threads, 0, stream>>>(p);
      }
      return cudaGetLastError();
    });
  });
}

cudaError_t segment_matmul_weights(Workspace& workspace, const void* x, const void* ptr, const void* grad, void* out,
                                   int64_t num_rows, int64_t num_segments, int64_t num_heads, int64_t inner,
                                   int64_t outer, DType dtype, cudaStream_t stream) {
  const int64_t values = num_heads * inner * outer;
  if (num_segments == 0 || values == 0) return cudaSuccess;
  const int64_t tiles = ceil_div(outer, Config::side) * ceil_div(inner, Config::side) * num_heads;
  int64_t part = ceil_div(num_rows * tiles, Config::blocks);
  part = part < Config::min_part ? Config::min_part : part > Config::max_part ? Config::max_part : part;
  const int64_t parts = num_rows / part + num_segments;
  void* const scratch = workspace.take(parts * values * accumulator_size(dtype));
  return with_types(dtype, IndexType::i32, [&](auto value, auto) {
    using T = decltype(value);
    Params<T> p = params_of<T>(x, ptr, num_rows, num_segments, num_heads, inner, outer);
    p.grad = static_cast<const T*>(grad);
    p.out = static_cast<T*>(out);
    p.shares = static_cast<Acc<T>*>(scratch);
    p.part = part;
    const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(tiles));
    return with_length<T>(inner, outer, x, grad, [&](auto length) {
      shares_kernel<T, length><<<grid, Config::threads, 0, stream>>>(p);
      const dim3 sums(static_cast<unsigned>(num_segments), static_cast<unsigned>(ceil_div(values, Config::threads)));
      sum_kernel<T><<<sums, Config::threads, 0, stream>>>(p, values);
      return cudaGetLastError();
    });
  });
}

}  // namespace cuda
}  // namespace gnnaccel
