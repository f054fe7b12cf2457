// What a layer adds to all its rows, and its gradient: sums of the columns of a matrix. Both move each number once:
// 25.6 MB (100,000 rows of 64 floats) take 8 us of an H100's memory.
//
// Of sums a thread keeps 16 bytes of columns of a block's rows, every so-manyeth of them; threads meet in shared
// memory, blocks in a second kernel, all in a fixed order. Where the numbers are wanted rounded too, as a layer of
// 16-bit features takes a gradient of float32, they are written while they are there.
#include "shares.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_bias_kernel(const T* x, const Acc<T>* bias, Acc<T>* out, int64_t count, int width) {
  using A = Acc<T>;
  constexpr int N = 16 / sizeof(T), n = 16 / sizeof(A);
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (first >= count) return;
  const int d = static_cast<int>(first % width);
  Pack<T, N> values;
  load(x + first, values);
#pragma unroll
  for (int i = 0; i < N; i += n) {
    Pack<A, n> sum;
    load(bias + d + i, sum);
#pragma unroll
    for (int j = 0; j < n; ++j) sum.values[j] += widen(values.values[i + j]);
    store(out + first + i, sum);
  }
}

// C: of what dtype the rounded ones are; that of x where nobody wants any.
template <typename T, typename C, int N>
__global__ void __launch_bounds__(kThreads) column_sums_kernel(const T* x, Acc<T>* shares, C* rounded, int64_t num_rows,
                                                               int64_t rows_of_block, int width, int columns) {
  using A = Acc<T>;
  __shared__ A shared[kThreads][N];
  const int column = threadIdx.x % columns, member = threadIdx.x / columns, members = kThreads / columns;
  const int d = (static_cast<int>(blockIdx.y) * columns + column) * N;
  const bool active = d < width && member < members;
  A sum[N] = {};
  const int64_t begin = blockIdx.x * rows_of_block;
  const int64_t end = begin + rows_of_block < num_rows ? begin + rows_of_block : num_rows;
#pragma unroll 4
  for (int64_t row = begin + member; active && row < end; row += members) {
    Pack<T, N> values;
    load(x + row * width + d, values);
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] += widen(values.values[n]);
    if constexpr (!std::is_same_v<T, C>) {
      Pack<C, N> to;
#pragma unroll
      for (int n = 0; n < N; ++n) to.values[n] = narrow<C>(values.values[n]);
      store(rounded + row * width + d, to);
    }
  }
  sum_members(shared, sum, columns, [&](int of, int i, A value) {
    const int at = (static_cast<int>(blockIdx.y) * columns + of) * N + i;
    if (at < width) shares[blockIdx.x * static_cast<int64_t>(width) + at] = value;
  });
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <typename T, typename C>
cudaError_t sum_columns(const void* x, void* out, void* rounded, void* scratch, int64_t blocks, int64_t num_rows,
                        int64_t width, cudaStream_t stream) {
  using A = Acc<T>;
  constexpr int wide = 16 / sizeof(T);
  A* const shares = static_cast<A*>(scratch);
  auto run = [&](auto length) {
    const int vectors = static_cast<int>(ceil_div(width, length));
    const int columns = vectors < kThreads ? vectors : kThreads;
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ceil_div(vectors, columns)));
    column_sums_kernel<T, C, length>
        <<<grid, kThreads, 0, stream>>>(static_cast<const T*>(x), shares, static_cast<C*>(rounded), num_rows,
                                        ceil_div(num_rows, blocks), static_cast<int>(width), columns);
    return sum_shares(shares, static_cast<A*>(out), static_cast<int>(width), blocks, stream);
  };
  const bool vectors = width % wide == 0 && aligned(x) && aligned(rounded);
  return vectors ? run(std::integral_constant<int, wide>{}) : run(std::integral_constant<int, 1>{});
}

}  // namespace

cudaError_t add_bias(const void* x, const void* bias, void* out, int64_t num_rows, int64_t width, DType dtype,
                     cudaStream_t stream) {
  if (num_rows == 0 || width == 0) return cudaSuccess;
  if (width % (16 / size_of(dtype)) || !aligned(x) || !aligned(bias) || !aligned(out)) return cudaErrorInvalidValue;
  return with_types(dtype, IndexType::i32, [&](auto value, auto) {
    using T = decltype(value);
    using A = Acc<T>;
    const int64_t count = num_rows * width;
    const unsigned blocks = static_cast<unsigned>(ceil_div(count, 16 / sizeof(T) * kThreads));
    add_bias_kernel<T><<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(x), static_cast<const A*>(bias),
                                                        static_cast<A*>(out), count, static_cast<int>(width));
    return cudaGetLastError();
  });
}

cudaError_t column_sums(Workspace& workspace, const void* x, void* out, void* rounded, DType rounded_dtype,
                        int64_t num_rows, int64_t width, DType dtype, cudaStream_t stream) {
  if (width == 0) return cudaSuccess;
  if (num_rows == 0) return cudaMemsetAsync(out, 0, width * accumulator_size(dtype), stream);
  const int64_t blocks = blocks_of_rows(num_rows);
  void* const scratch = workspace.take(blocks * width * accumulator_size(dtype));
  auto run = [&](auto value, auto narrower) {
    return sum_columns<decltype(value), decltype(narrower)>(x, out, rounded, scratch, blocks, num_rows, width, stream);
  };
  if (rounded) {
    if (dtype != DType::f32 || size_of(rounded_dtype) != 2) return cudaErrorInvalidValue;
    return rounded_dtype == DType::bf16 ? run(float{}, __nv_bfloat16{}) : run(float{}, __half{});
  }
  return with_types(dtype, IndexType::i32, [&](auto value, auto) { return run(value, value); });
}

}  // namespace cuda
}  // namespace gnnaccel
