// Sums of the columns of a matrix: the gradient of a bias, and of what else a layer adds to all its rows.
//
// A thread keeps 16 bytes of columns of a block's rows, every so-manyeth of them; threads meet in shared memory, blocks
// in a second kernel, all in a fixed order. Reads the matrix once: 25.6 MB (100,000 rows of 64 floats) take 8 us of an
// H100's memory.
#include "shares.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

constexpr int kThreads = 256;

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    column_sums_kernel(const T* x, Acc<T>* shares, int64_t num_rows, int64_t rows_of_block, int width, int columns) {
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
  }
#pragma unroll
  for (int n = 0; n < N; ++n) shared[threadIdx.x][n] = sum[n];
  __syncthreads();
  if (member || !active) return;
  for (int other = 1; other < members; ++other) {
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] += shared[other * columns + column][n];
  }
#pragma unroll
  for (int n = 0; n < N; ++n) shares[blockIdx.x * static_cast<int64_t>(width) + d + n] = sum[n];
}

}  // namespace

cudaError_t column_sums(Workspace& workspace, const void* x, void* out, int64_t num_rows, int64_t width, DType dtype,
                        cudaStream_t stream) {
  if (width == 0) return cudaSuccess;
  if (num_rows == 0) return cudaMemsetAsync(out, 0, width * accumulator_size(dtype), stream);
  const int64_t blocks = blocks_of_rows(num_rows);
  void* const scratch = workspace.take(blocks * width * accumulator_size(dtype));
  return with_types(dtype, IndexType::i32, [&](auto value, auto) {
    using T = decltype(value);
    using A = Acc<T>;
    constexpr int wide = 16 / sizeof(T);
    A* const shares = static_cast<A*>(scratch);
    auto run = [&](auto length) {
      // As many rows at a time as there is room for beside each other.
      const int vectors = static_cast<int>(ceil_div(width, length));
      const int columns = vectors < kThreads ? vectors : kThreads;
      const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(ceil_div(vectors, columns)));
      column_sums_kernel<T, length><<<grid, kThreads, 0, stream>>>(
          static_cast<const T*>(x), shares, num_rows, ceil_div(num_rows, blocks), static_cast<int>(width), columns);
      return sum_shares(shares, static_cast<A*>(out), static_cast<int>(width), blocks, stream);
    };
    const bool vectors = width % wide == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    return vectors ? run(std::integral_constant<int, wide>{}) : run(std::integral_constant<int, 1>{});
  });
}

}  // namespace cuda
}  // namespace gnnaccel
