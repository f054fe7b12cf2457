// Products of rows with the matrix of their segment, and the gradient of the matrices: one launch for all segments,
// which finds its way by the offsets on the device. A "segment" is of rows; weights may be block-diagonal, of `heads`
// blocks. Rows may be sums of rows of other features, which are added up where they are read: none is stored.
//
// Tiles of rows are numbered without a prefix sum: those of segment s begin at ptr[s] / tile + s, rounded down, which
// leaves each segment at least as many numbers as it has tiles; the others have nothing to do.
//
// A thread holds 8 x 8 values of the result: four 16-byte reads of shared memory feed 64 multiplications, which are
// then what bounds a block (with 8 x 4 values the reads were). It walks along the sums in panels in shared memory; one
// block fetches a panel while the three others of its multiprocessor multiply. f32 is multiplied as f32: no tensor
// cores. The gradient of a matrix is a sum over the rows of its segment, cut into parts that blocks add up and a second
// kernel adds, in a fixed order.
#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int threads = 128;
  static constexpr int rows = 128;    // of a tile of the product,
  static constexpr int columns = 64;  // and its columns
  static constexpr int side = 64;     // of a tile of the matrices' gradient, on which groups of 64 threads take turns
  static constexpr int groups = threads / 64;
  static constexpr int batch = 4;      // reads of a thread on their way together
  static constexpr int blocks = 1024;  // wanted for the matrices' gradient
  static constexpr int min_part = 128;
  static constexpr int max_part = 4096;  // rows that f32 adds up before f64 does
  static constexpr int slices = 4;       // of a segment's parts, which threads of the second kernel add up
};
static_assert(Config::threads == 128 && Config::rows == 128 && Config::columns == 64, "16 by 8 threads of 8 by 8");
static_assert(Config::side == 64 && Config::groups == 2, "two groups of 8 by 8 threads of 8 by 8");

// Values of a panel along the sum of a product, and rows of one of the matrices' gradient.
template <typename A>
constexpr int kStep = 128 / sizeof(A);
template <typename A>
constexpr int kDeep = 256 / sizeof(A);
// Of a multiprocessor, as far as registers go: two of them hold a double.
template <typename A>
constexpr int kBlocks = sizeof(A) == 4 ? 4 : 1;

// Row i is that of `data`, or, with an indptr, the sum over its nonzeros k of factors[k] * data[indices[k]].
template <typename T>
struct Rows {
  const T* data;  // [.., width]
  const void* indptr;
  const void* indices;
  const T* factors;  // null: ones
  int64_t width;
  bool wide;  // of 64-bit indices
};

template <typename T>
struct Params {
  Rows<T> x;           // [rows, heads * inner]
  Rows<T> grad;        // [rows, heads * outer]
  const int64_t* ptr;  // [segments + 1]
  const T* weight;     // [segments, heads, inner, outer], or transposed: [.., outer, inner]
  T* out;              // [rows, heads * outer], or [segments, heads, inner, outer]
  Acc<T>* shares;      // [parts, heads, inner, outer]
  int64_t part;        // rows
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

__device__ __forceinline__ int64_t index_at(const void* indices, int64_t k, bool wide) {
  return wide ? __ldg(static_cast<const int64_t*>(indices) + k) : __ldg(static_cast<const int32_t*>(indices) + k);
}

// What a row is the sum of: `count` nonzeros, the first of which is known.
template <typename A>
struct Sum {
  int64_t nonzero;
  int64_t source;
  int64_t count;
  A factor;
};

template <typename T>
__device__ __forceinline__ Sum<Acc<T>> sum_of(const Rows<T>& rows, int64_t i, bool inside) {
  Sum<Acc<T>> sum{0, 0, 0, Acc<T>(1)};
  if (!inside) return sum;
  sum.nonzero = index_at(rows.indptr, i, rows.wide);
  sum.count = index_at(rows.indptr, i + 1, rows.wide) - sum.nonzero;
  if (sum.count == 0) return sum;
  sum.source = index_at(rows.indices, sum.nonzero, rows.wide);
  if (rows.factors != nullptr) sum.factor = load_one(rows.factors + sum.nonzero);
  return sum;
}

// Calls store(row, d, N values from d on) for the values offset .. offset + Wide - 1 of `Tall` rows from `first` on, of
// which `count` are there; values from `length` on are 0. Gathered: `sums` is of these rows.
template <typename T, int N, bool Gathered, int Tall, int Wide, typename Store>
__device__ __forceinline__ void bring(const Rows<T>& rows, int head_begin, const Sum<Acc<T>>* sums, int64_t first,
                                      int count, int offset, int length, Store store) {
  using A = Acc<T>;
  constexpr int across = Wide / N, each = Tall * across / Config::threads;
  constexpr int batch = each < Config::batch ? each : Config::batch;
  static_assert(Tall * across % Config::threads == 0 && each % batch == 0, "equal shares");
  const T* const data = rows.data + head_begin;
#pragma unroll 1  // or all reads are moved to the front, and registers spill
  for (int j = 0; j < each; j += batch) {
    Pack<T, N> from[batch];
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      const int e = static_cast<int>(threadIdx.x) + (j + b) * Config::threads;
      const int row = e / across, d = offset + e % across * N;
      if (row >= count || d >= length) continue;
      if constexpr (Gathered) {
        if (sums[row].count > 0) load(data + sums[row].source * rows.width + d, from[b]);
      } else {
        load(data + (first + row) * rows.width + d, from[b]);
      }
    }
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      const int e = static_cast<int>(threadIdx.x) + (j + b) * Config::threads;
      const int row = e / across, d = offset + e % across * N;
      A values[N] = {};
      if (row < count && d < length) {
        if constexpr (Gathered) {
          const Sum<A> sum = sums[row];
          if (sum.count > 0) {
#pragma unroll
            for (int n = 0; n < N; ++n) values[n] = sum.factor * widen(from[b].values[n]);
          }
          for (int64_t k = sum.nonzero + 1; k < sum.nonzero + sum.count; ++k) {
            const A factor = rows.factors == nullptr ? A(1) : load_one(rows.factors + k);
            Pack<T, N> more;
            load(data + index_at(rows.indices, k, rows.wide) * rows.width + d, more);
#pragma unroll
            for (int n = 0; n < N; ++n) values[n] += factor * widen(more.values[n]);
          }
        } else {
#pragma unroll
          for (int n = 0; n < N; ++n) values[n] = widen(from[b].values[n]);
        }
      }
      store(row, e % across * N, values);
    }
  }
}

// Four neighbours in shared memory, by reads of 16 bytes.
template <typename A>
__device__ __forceinline__ void read_four(const A* from, A* to) {
  constexpr int length = 16 / sizeof(A);
#pragma unroll
  for (int n = 0; n < 4; n += length) {
    const Pack<A, length>& pack = *reinterpret_cast<const Pack<A, length>*>(from + n);
#pragma unroll
    for (int i = 0; i < length; ++i) to[n + i] = pack.values[i];
  }
}

// sum += left * right, of the values at `from_left` and `apart_left` behind it, and so on.
template <typename A>
__device__ __forceinline__ void multiply(const A* from_left, int apart_left, const A* from_right, int apart_right,
                                         A (&sum)[8][8]) {
  A left[8], right[8];
  read_four(from_left, left);
  read_four(from_left + apart_left, left + 4);
  read_four(from_right, right);
  read_four(from_right + apart_right, right + 4);
#pragma unroll
  for (int m = 0; m < 8; ++m) {
#pragma unroll
    for (int n = 0; n < 8; ++n) sum[m][n] += left[m] * right[n];
  }
}

template <typename T, int N, bool Turned, bool Gathered>
__global__ void __launch_bounds__(Config::threads, kBlocks<Acc<T>>) product_kernel(const Params<T> p) {
  using A = Acc<T>;
  constexpr int rows = Config::rows, columns = Config::columns, step = kStep<A>;
  // Position d of row r is at [d][r ^ (d & turn)]: neighbours of a row, and those of a column, lie in different banks.
  constexpr int turn = step - 4;
  alignas(16) __shared__ A xs[step][rows];
  alignas(16) __shared__ A ws[step][columns];
  __shared__ Sum<A> sums[Gathered ? rows : 1];
  const Piece piece = find_piece(p.ptr, p.segments, blockIdx.x, rows);
  if (piece.begin >= piece.end) return;
  const int across = (p.outer + columns - 1) / columns, i = threadIdx.x;
  const int head = static_cast<int>(blockIdx.y) / across, column = static_cast<int>(blockIdx.y) % across * columns;
  const int count = static_cast<int>(piece.end - piece.begin);
  if constexpr (Gathered) {
    sums[i] = sum_of(p.x, piece.begin + i, i < count);
    __syncthreads();
  }
  // The matrix as rows of its own: [inner, outer], or [outer, inner].
  const T* const matrix = p.weight + (static_cast<int64_t>(piece.segment) * p.heads + head) * p.inner * p.outer;
  const Rows<T> weight{matrix, nullptr, nullptr, nullptr, Turned ? p.inner : p.outer, false};
  const int top = i / 8 * 4, left = i % 8 * 4;
  A sum[8][8] = {};

  for (int k = 0; k < p.inner; k += step) {
    bring<T, N, Gathered, rows, step>(p.x, head * p.inner, sums, piece.begin, count, k, p.inner,
                                      [&](int row, int d, const A* values) {
#pragma unroll
                                        for (int n = 0; n < N; ++n) xs[d + n][row ^ ((d + n) & turn)] = values[n];
                                      });
    if constexpr (Turned) {
      bring<T, N, false, columns, step>(weight, 0, nullptr, column, p.outer - column, k, p.inner,
                                        [&](int c, int d, const A* values) {
#pragma unroll
                                          for (int n = 0; n < N; ++n) ws[d + n][c ^ ((d + n) & turn)] = values[n];
                                        });
    } else {
      bring<T, N, false, step, columns>(weight, 0, nullptr, k, p.inner - k, column, p.outer,
                                        [&](int d, int c, const A* values) {
#pragma unroll
                                          for (int n = 0; n < N; ++n) ws[d][(c + n) ^ (d & turn)] = values[n];
                                        });
    }
    __syncthreads();
    const int deep = p.inner - k < step ? p.inner - k : step;
#pragma unroll 4
    for (int d = 0; d < deep; ++d) {
      multiply(&xs[d][top ^ (d & turn)], rows / 2, &ws[d][left ^ (d & turn)], columns / 2, sum);
    }
    __syncthreads();
  }
  const int64_t wide = static_cast<int64_t>(p.heads) * p.outer;
  T* const out = p.out + piece.begin * wide + head * p.outer;
#pragma unroll
  for (int m = 0; m < 8; ++m) {
    const int row = top + m % 4 + m / 4 * (rows / 2);
#pragma unroll
    for (int n = 0; n < 8; n += N) {
      const int c = column + left + n % 4 + n / 4 * (columns / 2);
      if (row >= count || c >= p.outer) continue;
      Pack<T, N> to;
#pragma unroll
      for (int a = 0; a < N; ++a) to.values[a] = narrow<T>(sum[m][n + a]);
      store(out + row * wide + c, to);
    }
  }
}

template <typename T, int N, bool Gathered>
__global__ void __launch_bounds__(Config::threads, kBlocks<Acc<T>>) shares_kernel(const Params<T> p) {
  using A = Acc<T>;
  constexpr int side = Config::side, deep = kDeep<A>;
  alignas(16) __shared__ A panels[2][deep][side];  // of x, and of the gradient
  __shared__ Sum<A> sums[2][Gathered ? deep : 1];
  static_assert(sizeof(panels) >= side * side * sizeof(A), "a group's values, too");
  const Piece piece = find_piece(p.ptr, p.segments, blockIdx.x, p.part);
  if (piece.begin >= piece.end) return;
  const int across = (p.outer + side - 1) / side, tiles = (p.inner + side - 1) / side * across, i = threadIdx.x;
  const int head = static_cast<int>(blockIdx.y) / tiles, tile = static_cast<int>(blockIdx.y) % tiles;
  const int top = tile / across * side, left = tile % across * side;
  const int group = i / 64, a = i % 64 / 8 * 4, b = i % 8 * 4;
  A sum[8][8] = {};

  for (int64_t first = piece.begin; first < piece.end; first += deep) {
    const int count = piece.end - first < deep ? static_cast<int>(piece.end - first) : deep;
    if constexpr (Gathered) {
      for (int e = i; e < 2 * deep; e += Config::threads) {
        const Rows<T>& rows = e < deep ? p.x : p.grad;
        const int row = e % deep;
        Sum<A> one{0, first + row, row < count, A(1)};
        sums[e / deep][row] = rows.indptr == nullptr ? one : sum_of(rows, first + row, row < count);
      }
      __syncthreads();
    }
    bring<T, N, Gathered, deep, side>(p.x, head * p.inner, sums[0], first, count, top, p.inner,
                                      [&](int row, int d, const A* values) {
#pragma unroll
                                        for (int n = 0; n < N; ++n) panels[0][row][d + n] = values[n];
                                      });
    bring<T, N, Gathered, deep, side>(p.grad, head * p.outer, sums[1], first, count, left, p.outer,
                                      [&](int row, int d, const A* values) {
#pragma unroll
                                        for (int n = 0; n < N; ++n) panels[1][row][d + n] = values[n];
                                      });
    __syncthreads();
#pragma unroll 4
    for (int row = group; row < count; row += Config::groups) {
      multiply(&panels[0][row][a], side / 2, &panels[1][row][b], side / 2, sum);
    }
    __syncthreads();
  }
  A* const other = &panels[0][0][0];  // [side, side] of the second group
  A* const share = p.shares + (static_cast<int64_t>(blockIdx.x) * p.heads + head) * p.inner * p.outer;
  for (int owner = 1; owner >= 0; --owner) {
    if (group == owner) {
#pragma unroll
      for (int m = 0; m < 8; ++m) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int d = a + m % 4 + m / 4 * (side / 2), c = b + n % 4 + n / 4 * (side / 2);
          if (owner == 1) {
            other[d * side + c] = sum[m][n];
          } else if (top + d < p.inner && left + c < p.outer) {
            share[static_cast<int64_t>(top + d) * p.outer + left + c] = sum[m][n] + other[d * side + c];
          }
        }
      }
    }
    __syncthreads();
  }
}

// 32 values of a segment's matrices to a block, each to `slices` threads.
template <typename T>
__global__ void __launch_bounds__(Config::threads) sum_kernel(const Params<T> p, int64_t values) {
  constexpr int slices = Config::slices, width = Config::threads / slices;
  __shared__ double found[slices][width];
  const int64_t blocks = (values + width - 1) / width, segment = blockIdx.x / blocks;
  const int slice = threadIdx.x / width, lane = threadIdx.x % width;
  const int64_t i = blockIdx.x % blocks * width + lane;
  const int64_t begin = __ldg(p.ptr + segment), end = __ldg(p.ptr + segment + 1);
  const int64_t parts = (end - begin + p.part - 1) / p.part;
  double sum = 0;
  if (i < values) {
    const Acc<T>* share = p.shares + (begin / p.part + segment) * values + i;
#pragma unroll 8
    for (int64_t k = slice; k < parts; k += slices) sum += share[k * values];
  }
  found[slice][lane] = sum;
  __syncthreads();
  if (slice != 0 || i >= values) return;
#pragma unroll
  for (int k = 1; k < slices; ++k) sum += found[k][lane];
  p.out[segment * values + i] = narrow<T>(static_cast<Acc<T>>(sum));
}

template <typename T>
Rows<T> rows_of(const void* data, const Csr* sums, const void* factors, int64_t width) {
  Rows<T> rows{};
  rows.data = static_cast<const T*>(data);
  rows.width = width;
  if (sums == nullptr) return rows;
  rows.indptr = sums->indptr;
  rows.indices = sums->indices;
  rows.factors = static_cast<const T*>(factors);
  rows.wide = sums->index_type == IndexType::i64;
  return rows;
}

template <typename T>
Params<T> params_of(const void* ptr, int64_t num_segments, int64_t num_heads, int64_t inner, int64_t outer) {
  Params<T> p{};
  p.ptr = static_cast<const int64_t*>(ptr);
  p.segments = static_cast<int>(num_segments);
  p.heads = static_cast<int>(num_heads);
  p.inner = static_cast<int>(inner);
  p.outer = static_cast<int>(outer);
  return p;
}

// f(how many values are read at once, whether rows are `gathered`) as constants.
template <typename T, typename F>
cudaError_t with_way(int64_t inner, int64_t outer, const void* one, const void* other, bool gathered, F f) {
  constexpr int most = sizeof(T) == 8 ? 2 : 4;
  const uintptr_t bits = reinterpret_cast<uintptr_t>(one) | reinterpret_cast<uintptr_t>(other);
  const auto with_length = [&](auto length) {
    return gathered ? f(length, std::true_type{}) : f(length, std::false_type{});
  };
  if (inner % most || outer % most || bits % 16) return with_length(std::integral_constant<int, 1>{});
  return with_length(std::integral_constant<int, most>{});
}

}  // namespace

cudaError_t segment_matmul(const Csr* sums, const void* factors, const void* x, const void* ptr, const void* weight,
                           void* out, int64_t num_rows, int64_t num_segments, int64_t num_heads, int64_t inner,
                           int64_t outer, bool transposed, DType dtype, cudaStream_t stream) {
  if (num_rows == 0 || outer == 0) return cudaSuccess;
  return with_types(dtype, IndexType::i32, [&](auto value, auto) {
    using T = decltype(value);
    Params<T> p = params_of<T>(ptr, num_segments, num_heads, inner, outer);
    p.x = rows_of<T>(x, sums, factors, num_heads * inner);
    p.weight = static_cast<const T*>(weight);
    p.out = static_cast<T*>(out);
    const dim3 grid(static_cast<unsigned>(num_rows / Config::rows + num_segments),
                    static_cast<unsigned>(ceil_div(outer, Config::columns) * num_heads));
    return with_way<T>(inner, outer, x, weight, sums != nullptr, [&](auto length, auto gathered) {
      if (transposed) {
        product_kernel<T, length, true, gathered><<<grid, Config::threads, 0, stream>>>(p);
      } else {
        product_kernel<T, length, false, gathered><<<grid, Config::threads, 0, stream>>>(p);
      }
      return cudaGetLastError();
    });
  });
}

cudaError_t segment_matmul_weights(Workspace& workspace, const Csr* sums, const void* factors, const void* x,
                                   const void* ptr, const Csr* grad_sums, const void* grad_factors, const void* grad,
                                   void* out, int64_t num_rows, int64_t num_segments, int64_t num_heads, int64_t inner,
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
    Params<T> p = params_of<T>(ptr, num_segments, num_heads, inner, outer);
    p.x = rows_of<T>(x, sums, factors, num_heads * inner);
    p.grad = rows_of<T>(grad, grad_sums, grad_factors, num_heads * outer);
    p.out = static_cast<T*>(out);
    p.shares = static_cast<Acc<T>*>(scratch);
    p.part = part;
    const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(tiles));
    const bool any = sums != nullptr || grad_sums != nullptr;
    return with_way<T>(inner, outer, x, grad, any, [&](auto length, auto gathered) {
      shares_kernel<T, length, gathered><<<grid, Config::threads, 0, stream>>>(p);
      const int64_t blocks = num_segments * ceil_div(values, Config::threads / Config::slices);
      sum_kernel<T><<<static_cast<unsigned>(blocks), Config::threads, 0, stream>>>(p, values);
      return cudaGetLastError();
    });
  });
}

}  // namespace cuda
}  // namespace gnnaccel
