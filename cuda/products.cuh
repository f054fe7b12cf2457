// Products of matrices of many rows with small ones in f32 on tensor cores, their gradients, and two of them with a
// batch norm and a ReLU between them. A float is the sum of two tf32 (mma.cuh), of four products the smallest is left
// out: as near as sums of f32, at the speed of memory where an f32 product of 64 to 256 columns is bound by arithmetic.
//
// Tensor cores round sums towards zero, so that they add up a panel of 32 values at most; f32 adds up the panels.
// A block fetches panels two ahead into shared memory. What is done to them there is done by the thread that fetched
// them: a batch norm and its ReLU, or the gradient through these. So neither is stored, and of statistics and sums over
// columns a product leaves those of its tile, which a small kernel adds up in f64, in a fixed order.
#pragma once

#include "common.cuh"
#include "mma.cuh"

namespace gnnaccel {
namespace cuda {
namespace products_impl {

struct Config {
  static constexpr int threads = 128;  // four warps of 32 rows and 64 columns each
  static constexpr int rows = 128;     // of a tile of a product,
  static constexpr int columns = 64;   // and its columns
  static constexpr int step = 32;      // values of a panel
  static constexpr int stages = 2;     // panels that are there or on their way
  static constexpr int blocks = 396;   // wanted for a gradient of weights: three to each of an H100's multiprocessors
  static constexpr int min_part = 256;
  static constexpr int sum_threads = 1024;
  static constexpr int sum_columns = 4;  // of a block that adds up what tiles have left
};

// Rows of panels in shared memory, apart so that the 8 x 4 lanes of a fragment read 32 banks.
constexpr int kAlong = Config::step + 4;       // with the sum along a row
constexpr int kAcross = Config::columns + 8;   // with columns along a row
constexpr int kAcrossWide = Config::rows + 8;  // the same of the wider side of a gradient of weights
constexpr int kPanel = Config::rows * kAlong;
constexpr int kWidePanel = Config::step * kAcrossWide;
constexpr int kRightPanel = Config::columns * kAlong;           // and of columns along a row
constexpr int kTile = Config::rows * kAcross;                   // of a result, where panels were
constexpr int kRoom = Config::stages * (kPanel + kRightPanel);  // of a product's panels
static_assert(kTile + 6 * Config::columns <= kRoom, "a tile and what `add_rows` needs behind it");
static_assert(Config::step * kAcross <= kRightPanel && Config::rows == Config::threads, "as panels are laid out");

// What becomes of rows that a product reads: as they are; of `rows` relu((rows - mean) * scale + shift); or
// scale * rows + slope * (other - mean) + offset.
enum class Change { none, norm, back };

// What a product leaves beside its result: nothing; of each tile the columns' means and sums of squared differences; or
// it passes a ReLU backwards, relu((hidden - mean) * scale + shift), and leaves sums of the columns, and of these times
// (hidden - mean) / deviation.
enum class Leave { none, moments, gated };

// [4, columns]: mean, scale, shift, 1 / deviation.
struct Norm {
  const float* data;
  const float* slopes;  // [2, columns]: slope and offset
  int columns;
};

struct Matrix {
  const float* data;
  const float* other;  // of the same shape
  Norm norm;
  int columns;
};

struct Params {
  Matrix x;             // [rows, inner]
  const float* weight;  // [outer, inner], or transposed: [inner, outer]
  const float* bias;    // [outer] or null
  float* out;           // [rows, outer]
  float* left;          // [tiles, 2, outer]
  const float* hidden;  // [rows, outer]
  Norm norm;            // of that
  int64_t num_rows;
  int inner;
  int outer;
};

// 16 bytes into shared memory while the thread goes on; zeros if there is nothing.
__device__ __forceinline__ void copy_ahead(float* to, const float* from, bool present) {
  const int bytes = present ? 16 : 0;
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(bytes));
}

__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void wait_for_all_groups() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void wait_for_all_but_one_group() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// Calls of the threads of a block with all values of a panel [Tall, Wide], four at a time: each(row, column). A
// thread's columns are the same in all rows.
template <int Tall, int Wide, typename Each>
__device__ __forceinline__ void over_panel(Each each) {
  static_assert(Config::threads % (Wide / 4) == 0 && Tall * Wide / 4 % Config::threads == 0, "equal shares");
  constexpr int apart = Config::threads / (Wide / 4);
  const int first = static_cast<int>(threadIdx.x) / (Wide / 4), column = static_cast<int>(threadIdx.x) % (Wide / 4) * 4;
#pragma unroll 4
  for (int row = 0; row < Tall; row += apart) each(first + row, column);
}

// Panel [Tall, Wide] of the rows from `first` on and the columns from `column` on; zeros beyond the ends.
template <int Tall, int Wide, int Pitch>
__device__ __forceinline__ void fetch(float* to, const float* from, int64_t first, int64_t end, int column,
                                      int columns) {
  over_panel<Tall, Wide>([&](int row, int c) {
    const bool present = first + row < end && column + c < columns;
    copy_ahead(to + row * Pitch + c, present ? from + (first + row) * columns + column + c : from, present);
  });
}

using Four = Pack<float, 4>;
using Two = Pack<float, 2>;

__device__ __forceinline__ float positive(float x) { return x < 0 ? 0.0f : x; }  // NaN stays

// The change of a panel by the threads that fetched it; `other` lies as it does.
template <Change C, int Tall, int Wide, int Pitch>
__device__ __forceinline__ void change(float* panel, const float* other, const Norm& norm, int64_t first, int64_t end,
                                       int column) {
  if constexpr (C == Change::none) return;
  const int mine = column + static_cast<int>(threadIdx.x) % (Wide / 4) * 4;
  const bool inside = mine < norm.columns;
  const float* const from = norm.data + (inside ? mine : 0);
  const float* const slopes = norm.slopes + (inside ? mine : 0);
  Four mean, scale, slope, shift;
  load(from, mean);
  load(from + norm.columns, scale);
  if constexpr (C == Change::norm) {
    load(from + 2 * norm.columns, shift);
  } else {
    load(slopes, slope);
    load(slopes + norm.columns, shift);
  }
  over_panel<Tall, Wide>([&](int row, int c) {
    Four& x = *reinterpret_cast<Four*>(panel + row * Pitch + c);
    const bool present = inside && first + row < end;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float made;
      if constexpr (C == Change::norm) {
        made = positive((x.values[i] - mean.values[i]) * scale.values[i] + shift.values[i]);
      } else {
        const float apart = other[row * Pitch + c + i] - mean.values[i];
        made = scale.values[i] * x.values[i] + (slope.values[i] * apart + shift.values[i]);
      }
      x.values[i] = present ? made : 0.0f;
    }
  });
}

// sum += left * right over a panel: of the warp's 32 rows, value k of row r at r * LeftRow + k * LeftStep, and of 64
// columns.
template <int LeftRow, int LeftStep, int RightColumn, int RightStep>
__device__ __forceinline__ void multiply(const float* left, const float* right, float (&sum)[2][8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float part[2][4][4] = {};
#pragma unroll 2  // or all reads are moved to the front, and registers spill
    for (int k = 0; k < Config::step; k += 8) {
      uint32_t high[2][4], low[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          split(left[(m * 16 + g + i % 2 * 8) * LeftRow + (k + t + i / 2 * 4) * LeftStep], high[m][i], low[m][i]);
        }
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t upper[2], lower[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          split(right[(half * 32 + n * 8 + g) * RightColumn + (k + t + i * 4) * RightStep], upper[i], lower[i]);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add(part[m][n], low[m], upper[0], upper[1]);
          multiply_add(part[m][n], high[m], lower[0], lower[1]);
          multiply_add(part[m][n], high[m], upper[0], upper[1]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][half * 4 + n][i] += part[m][n][i];
      }
    }
  }
}

// shared[column] = the sum over the tile's rows of value(m, n, i), by all threads. shared: [5, columns].
template <typename Value>
__device__ __forceinline__ void add_rows(float* shared, Value value) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = (value(0, n, j) + value(0, n, 2 + j)) + (value(1, n, j) + value(1, n, 2 + j));
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane < 4) shared[(warp + 1) * Config::columns + n * 8 + lane * 2 + j] = sum;
    }
  }
  __syncthreads();
  const int column = threadIdx.x;
  if (column < Config::columns) {
    const float* const each = shared + Config::columns + column;
    shared[column] = (each[0] + each[Config::columns]) + (each[2 * Config::columns] + each[3 * Config::columns]);
  }
  __syncthreads();
}

template <Change C, Leave L, bool Turned>
__global__ void __launch_bounds__(Config::threads, C == Change::back ? 2 : 3) product_kernel(const Params p) {
  extern __shared__ float shared[];
  constexpr int each = kPanel * (C == Change::back ? 2 : 1) + kRightPanel;
  const int tiles = (p.outer + Config::columns - 1) / Config::columns;
  const int64_t tile = blockIdx.x / tiles, first_row = tile * Config::rows;
  const int first_column = static_cast<int>(blockIdx.x % tiles) * Config::columns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto bring = [&](int k) {
    float* const to = shared + k / Config::step % Config::stages * each;
    if (k < p.inner) {
      fetch<Config::rows, Config::step, kAlong>(to, p.x.data, first_row, p.num_rows, k, p.inner);
      if constexpr (C == Change::back) {
        fetch<Config::rows, Config::step, kAlong>(to + kPanel + kRightPanel, p.x.other, first_row, p.num_rows, k,
                                                  p.inner);
      }
      if constexpr (Turned) {
        fetch<Config::step, Config::columns, kAcross>(to + kPanel, p.weight, k, p.inner, first_column, p.outer);
      } else {
        fetch<Config::columns, Config::step, kAlong>(to + kPanel, p.weight, first_column, p.outer, k, p.inner);
      }
    }
    close_group();
  };
  float sum[2][8][4] = {};
  bring(0);
  bring(Config::step);
#pragma unroll 1
  for (int k = 0; k < p.inner; k += Config::step) {
    float* const panel = shared + k / Config::step % Config::stages * each;
    wait_for_all_but_one_group();
    change<C, Config::rows, Config::step, kAlong>(panel, panel + kPanel + kRightPanel, p.x.norm, first_row, p.num_rows,
                                                  k);
    __syncthreads();
    constexpr int right_column = Turned ? 1 : kAlong, right_step = Turned ? kAcross : 1;
    multiply<kAlong, 1, right_column, right_step>(panel + warp * 32 * kAlong, panel + kPanel, sum);
    __syncthreads();
    bring(k + Config::stages * Config::step);
  }
  if constexpr (L == Leave::gated) {  // by reads of whole lines, all at once
    fetch<Config::rows, Config::columns, kAcross>(shared, p.hidden, first_row, p.num_rows, first_column, p.outer);
    close_group();
    wait_for_all_groups();
    __syncthreads();
  }
  // Value i of tile [16, 8] number m, n is that of this row, and of one of two columns side by side.
  const auto place_of = [&](int m, int n, int i) {
    return (warp * 32 + m * 16 + lane / 4 + i / 2 * 8) * kAcross + n * 8 + lane % 4 * 2 + i % 2;
  };
  const auto row_of = [&](int m, int i) { return first_row + warp * 32 + m * 16 + lane / 4 + i / 2 * 8; };
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int column = first_column + n * 8 + lane % 4 * 2;
    const bool inside = column < p.outer;
    Two bias, mean, scale, shift;
    bias.values[0] = bias.values[1] = 0;
    if (inside && p.bias != nullptr) load(p.bias + column, bias);
    if (L == Leave::gated && inside) {
      load(p.norm.data + column, mean);
      load(p.norm.data + p.outer + column, scale);
      load(p.norm.data + 2 * p.outer + column, shift);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int64_t row = row_of(m, i), at = row * p.outer + column;
        const bool present = inside && row < p.num_rows;
        Two z, made;
        if (L == Leave::gated) z = *reinterpret_cast<const Two*>(shared + place_of(m, n, i));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = sum[m][n][i + j];
          x = present ? x + bias.values[j] : 0.0f;
          if (L == Leave::gated && present && !((z.values[j] - mean.values[j]) * scale.values[j] + shift.values[j] > 0))
            x = 0;
          made.values[j] = x;
        }
        if (present) store(p.out + at, made);
      }
    }
  }
  if constexpr (L == Leave::none) return;
  const int column = first_column + static_cast<int>(threadIdx.x);
  const bool mine = threadIdx.x < Config::columns && column < p.outer;
  float* const room = shared + kTile;
  float* const to = p.left + tile * 2 * p.outer + column;
  add_rows(room, [&](int m, int n, int i) { return sum[m][n][i]; });
  if constexpr (L == Leave::moments) {
    const int64_t rest = p.num_rows - first_row;
    const float count = static_cast<float>(rest < Config::rows ? rest : Config::rows);
    float* const mean = room + 5 * Config::columns;
    if (threadIdx.x < Config::columns) mean[threadIdx.x] = room[threadIdx.x] / count;
    __syncthreads();
    if (mine) to[0] = mean[threadIdx.x];
    add_rows(room, [&](int m, int n, int i) {
      const float apart = sum[m][n][i] - mean[n * 8 + lane % 4 * 2 + i % 2];
      return row_of(m, i) < p.num_rows ? apart * apart : 0.0f;
    });
    if (mine) to[p.outer] = room[threadIdx.x];
  } else {
    if (mine) to[0] = room[threadIdx.x];
    __syncthreads();
    add_rows(room, [&](int m, int n, int i) {
      const int at = first_column + n * 8 + lane % 4 * 2 + i % 2;
      if (at >= p.outer) return 0.0f;  // of rows that are not there the first factor is 0
      const float* const norm = p.norm.data + at;
      return sum[m][n][i] * ((shared[place_of(m, n, i)] - __ldg(norm)) * __ldg(norm + 3 * p.outer));
    });
    if (mine) to[p.outer] = room[threadIdx.x];
  }
}

}  // namespace products_impl
}  // namespace cuda
}  // namespace gnnaccel
