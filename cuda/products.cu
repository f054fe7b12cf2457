// The gradients of weights, what adds up shares and tiles, and the launchers; products themselves are in products.cuh.
#include "products.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

using namespace products_impl;

struct Weights {
  Matrix left;    // [rows, columns], the wider
  Matrix right;   // [rows, columns]
  float* shares;  // [parts, size]: each left.T @ right, behind it a sum over the rows
  int64_t num_rows;
  int64_t part;  // rows
  int64_t size;
  int left_step;  // from one column of the left to the next in the result,
  int right_step;
  int bias;  // -1: sums of the left's columns, 1: of the right's, 0: none
};

// left.T @ right over a part of the rows.
template <Change C>
__global__ void __launch_bounds__(Config::threads, C == Change::back ? 2 : 3) weights_kernel(const Weights p) {
  extern __shared__ float shared[];
  constexpr int right_panel = Config::step * kAcross;
  constexpr int each = kWidePanel * (C == Change::back ? 2 : 1) + right_panel;
  const int across = (p.right.columns + Config::columns - 1) / Config::columns;
  const int left_column = static_cast<int>(blockIdx.y) / across * Config::rows;
  const int right_column = static_cast<int>(blockIdx.y) % across * Config::columns;
  const int64_t begin = blockIdx.x * p.part, end = begin + p.part < p.num_rows ? begin + p.part : p.num_rows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto bring = [&](int64_t row) {
    float* const to = shared + (row - begin) / Config::step % Config::stages * each;
    if (row < end) {
      fetch<Config::step, Config::rows, kAcrossWide>(to, p.left.data, row, end, left_column, p.left.columns);
      fetch<Config::step, Config::columns, kAcross>(to + kWidePanel, p.right.data, row, end, right_column,
                                                    p.right.columns);
      if constexpr (C == Change::back) {
        fetch<Config::step, Config::rows, kAcrossWide>(to + kWidePanel + right_panel, p.left.other, row, end,
                                                       left_column, p.left.columns);
      }
    }
    close_group();
  };
  float sum[2][8][4] = {}, column_sum = 0;
  bring(begin);
  bring(begin + Config::step);
#pragma unroll 1
  for (int64_t row = begin; row < end; row += Config::step) {
    float* const panel = shared + (row - begin) / Config::step % Config::stages * each;
    wait_for_all_but_one_group();
    change<C, Config::step, Config::rows, kAcrossWide>(panel, panel + kWidePanel + right_panel, p.left.norm, row, end,
                                                       left_column);
    __syncthreads();
    multiply<1, kAcrossWide, 1, kAcross>(panel + warp * 32, panel + kWidePanel, sum);
    if (p.bias < 0 || (p.bias > 0 && threadIdx.x < Config::columns)) {
      const float* const from = panel + (p.bias < 0 ? 0 : kWidePanel) + threadIdx.x;
      const int apart = p.bias < 0 ? kAcrossWide : kAcross;
      float few = 0;
#pragma unroll 8
      for (int k = 0; k < Config::step; ++k) few += from[k * apart];
      column_sum += few;
    }
    __syncthreads();
    bring(row + Config::stages * Config::step);
  }
  float* const share = p.shares + blockIdx.x * p.size;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int l = left_column + warp * 32 + m * 16 + lane / 4 + i / 2 * 8;
        const int r = right_column + n * 8 + lane % 4 * 2 + i % 2;
        if (l < p.left.columns && r < p.right.columns) {
          share[static_cast<int64_t>(l) * p.left_step + static_cast<int64_t>(r) * p.right_step] = sum[m][n][i];
        }
      }
    }
  }
  if (p.bias == 0 || (p.bias < 0 ? right_column : left_column) != 0) return;
  const int column = (p.bias < 0 ? left_column : right_column) + static_cast<int>(threadIdx.x);
  const int columns = p.bias < 0 ? p.left.columns : p.right.columns;
  if (column < columns && (p.bias < 0 || threadIdx.x < Config::columns)) {
    share[static_cast<int64_t>(p.left.columns) * p.right.columns + column] = column_sum;
  }
}

// The sum of the shares, into `out` and what lies behind `count` values into `bias`.
__global__ void __launch_bounds__(Config::sum_threads)
    shares_kernel(const float* shares, float* out, float* bias, int64_t count, int64_t size, int64_t parts) {
  constexpr int warps = Config::sum_threads / 32;
  __shared__ double sums[warps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  double sum = 0;
#pragma unroll 8
  for (int64_t part = warp; part < parts; part += warps) sum += i < size ? shares[part * size + i] : 0.0f;
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp || i >= size) return;
  for (int other = 1; other < warps; ++other) sum += sums[other][lane];
  (i < count ? out[i] : bias[i - count]) = static_cast<float>(sum);
}

// first, second = the sums over the tiles of each(tile, column) [2], to thread 0 .. sum_columns - 1 of a block.
template <typename Each>
__device__ __forceinline__ bool add_tiles(int64_t tiles, int columns, Each each, double& first, double& second) {
  constexpr int slices = Config::sum_threads / Config::sum_columns;
  __shared__ double sums[2][slices][Config::sum_columns];
  const int slice = threadIdx.x / Config::sum_columns, lane = threadIdx.x % Config::sum_columns;
  const int column = static_cast<int>(blockIdx.x) * Config::sum_columns + lane;
  first = second = 0;
#pragma unroll 8
  for (int64_t tile = slice; tile < tiles; tile += slices) {
    if (column < columns) each(tile, column, first, second);
  }
  for (int step = slices / 2; step > 0; step /= 2) {
    sums[0][slice][lane] = first;
    sums[1][slice][lane] = second;
    __syncthreads();
    if (slice < step) {
      first += sums[0][slice + step][lane];
      second += sums[1][slice + step][lane];
    }
    __syncthreads();
  }
  return slice == 0 && column < columns;
}

struct Statistics {
  const float* left;  // [tiles, 2, columns]
  const float* gamma;
  const float* beta;
  float* running_mean;
  float* running_var;
  float* norm;    // [4, columns]
  float* slopes;  // [2, columns]
  float* grad_gamma;
  float* grad_beta;
  int64_t num_rows;
  int64_t tiles;
  int columns;
  double eps;
  double momentum;
};

__global__ void __launch_bounds__(Config::sum_threads) moments_kernel(const Statistics p) {
  double sum, square;
  const auto take = [&](int64_t tile, int column, double& first, double& second) {
    const int64_t rest = p.num_rows - tile * Config::rows;
    const double count = static_cast<double>(rest < Config::rows ? rest : Config::rows);
    const double mean = p.left[tile * 2 * p.columns + column];
    first += count * mean;
    second += p.left[(tile * 2 + 1) * p.columns + column] + count * mean * mean;
  };
  if (!add_tiles(p.tiles, p.columns, take, sum, square)) return;
  const int column = static_cast<int>(blockIdx.x) * Config::sum_columns + static_cast<int>(threadIdx.x);
  const double count = static_cast<double>(p.num_rows), mean = sum / count;
  double apart = square - sum * mean;
  if (apart < 0) apart = 0;
  const double inverse = 1 / sqrt(apart / count + p.eps);
  p.norm[column] = static_cast<float>(mean);
  p.norm[p.columns + column] = static_cast<float>(inverse * p.gamma[column]);
  p.norm[2 * p.columns + column] = p.beta[column];
  p.norm[3 * p.columns + column] = static_cast<float>(inverse);
  if (p.running_mean == nullptr) return;
  p.running_mean[column] = static_cast<float>((1 - p.momentum) * p.running_mean[column] + p.momentum * mean);
  p.running_var[column] =
      static_cast<float>((1 - p.momentum) * p.running_var[column] + p.momentum * apart / (count - 1));
}

__global__ void __launch_bounds__(Config::sum_threads) slopes_kernel(const Statistics p) {
  double sum, product;
  const auto take = [&](int64_t tile, int column, double& first, double& second) {
    first += p.left[tile * 2 * p.columns + column];
    second += p.left[(tile * 2 + 1) * p.columns + column];
  };
  if (!add_tiles(p.tiles, p.columns, take, sum, product)) return;
  const int column = static_cast<int>(blockIdx.x) * Config::sum_columns + static_cast<int>(threadIdx.x);
  const double count = static_cast<double>(p.num_rows);
  const double scale = p.norm[p.columns + column], inverse = p.norm[3 * p.columns + column];
  p.grad_beta[column] = static_cast<float>(sum);
  p.grad_gamma[column] = static_cast<float>(product);
  p.slopes[column] = static_cast<float>(-scale * inverse * product / count);
  p.slopes[p.columns + column] = static_cast<float>(-scale * sum / count);
}

template <Change C, Leave L, bool Turned>
cudaError_t product(const Params& p, cudaStream_t stream) {
  constexpr int64_t bytes =
      Config::stages * (kPanel * (C == Change::back ? 2 : 1) + kRightPanel) * static_cast<int64_t>(sizeof(float));
  const int64_t blocks = ceil_div(p.num_rows, Config::rows) * ceil_div(p.outer, Config::columns);
  const cudaError_t status = allow_shared(product_kernel<C, L, Turned>, bytes);
  if (status != cudaSuccess) return status;
  product_kernel<C, L, Turned><<<dim3(static_cast<unsigned>(blocks)), Config::threads, bytes, stream>>>(p);
  return cudaGetLastError();
}

Matrix matrix(const void* data, int64_t columns) {
  return {static_cast<const float*>(data), nullptr, {nullptr, nullptr, 0}, static_cast<int>(columns)};
}

// out [outer, inner] = grad.T @ x, one of which is `wide`.
template <Change C>
cudaError_t weights(Workspace& workspace, const Matrix& wide, const Matrix& narrow, bool wide_is_x, void* out,
                    void* bias, int64_t num_rows, cudaStream_t stream) {
  constexpr int64_t bytes = Config::stages * (kWidePanel * (C == Change::back ? 2 : 1) + Config::step * kAcross) *
                            static_cast<int64_t>(sizeof(float));
  Weights p{wide, narrow};
  p.num_rows = num_rows;
  p.left_step = wide_is_x ? 1 : narrow.columns;
  p.right_step = wide_is_x ? wide.columns : 1;
  p.bias = bias == nullptr ? 0 : wide_is_x ? 1 : -1;
  const int64_t count = static_cast<int64_t>(wide.columns) * narrow.columns;
  p.size = count + (p.bias == 0 ? 0 : p.bias < 0 ? wide.columns : narrow.columns);
  const int64_t tall = ceil_div(wide.columns, Config::rows), across = ceil_div(narrow.columns, Config::columns);
  const int64_t wanted = ceil_div(Config::blocks, tall * across), least = ceil_div(num_rows, wanted);
  p.part = ceil_div(least < Config::min_part ? Config::min_part : least, Config::step) * Config::step;
  const int64_t parts = ceil_div(num_rows, p.part);
  p.shares = static_cast<float*>(workspace.take(parts * p.size * static_cast<int64_t>(sizeof(float))));
  const cudaError_t status = allow_shared(weights_kernel<C>, bytes);
  if (status != cudaSuccess) return status;
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(tall * across));
  weights_kernel<C><<<grid, Config::threads, bytes, stream>>>(p);
  shares_kernel<<<dim3(static_cast<unsigned>(ceil_div(p.size, 32))), Config::sum_threads, 0, stream>>>(
      p.shares, static_cast<float*>(out), static_cast<float*>(bias), count, p.size, parts);
  return cudaGetLastError();
}

Params params(const void* x, const void* weight, const void* bias, void* out, int64_t num_rows, int64_t inner,
              int64_t outer) {
  Params p{matrix(x, inner), static_cast<const float*>(weight), static_cast<const float*>(bias),
           static_cast<float*>(out)};
  p.num_rows = num_rows;
  p.inner = static_cast<int>(inner);
  p.outer = static_cast<int>(outer);
  return p;
}

unsigned sum_blocks(int64_t columns) { return static_cast<unsigned>(ceil_div(columns, Config::sum_columns)); }

}  // namespace

cudaError_t linear(const void* x, const void* weight, const void* bias, void* out, int64_t num_rows, int64_t inner,
                   int64_t outer, bool transposed, cudaStream_t stream) {
  const Params p = params(x, weight, bias, out, num_rows, inner, outer);
  return transposed ? product<Change::none, Leave::none, true>(p, stream)
                    : product<Change::none, Leave::none, false>(p, stream);
}

cudaError_t linear_weights(Workspace& workspace, const void* x, const void* grad, void* grad_weight, void* grad_bias,
                           int64_t num_rows, int64_t inner, int64_t outer, cudaStream_t stream) {
  const Matrix from = matrix(x, inner), to = matrix(grad, outer);
  return inner > outer ? weights<Change::none>(workspace, from, to, true, grad_weight, grad_bias, num_rows, stream)
                       : weights<Change::none>(workspace, to, from, false, grad_weight, grad_bias, num_rows, stream);
}

cudaError_t normed_layers(Workspace& workspace, const void* x, const void* weight, const void* bias, const void* gamma,
                          const void* beta, void* running_mean, void* running_var, const void* last_weight,
                          const void* last_bias, void* hidden, void* norm, void* out, int64_t num_rows, int64_t inner,
                          int64_t width, int64_t outer, double eps, double momentum, cudaStream_t stream) {
  Statistics s{};
  s.tiles = ceil_div(num_rows, Config::rows);
  s.num_rows = num_rows;
  s.columns = static_cast<int>(width);
  s.gamma = static_cast<const float*>(gamma);
  s.beta = static_cast<const float*>(beta);
  s.running_mean = static_cast<float*>(running_mean);
  s.running_var = static_cast<float*>(running_var);
  s.norm = static_cast<float*>(norm);
  s.eps = eps;
  s.momentum = momentum;
  Params first = params(x, weight, bias, hidden, num_rows, inner, width);
  first.left = static_cast<float*>(workspace.take(s.tiles * 2 * width * static_cast<int64_t>(sizeof(float))));
  s.left = first.left;
  cudaError_t status = product<Change::none, Leave::moments, false>(first, stream);
  if (status != cudaSuccess) return status;
  moments_kernel<<<dim3(sum_blocks(width)), Config::sum_threads, 0, stream>>>(s);
  Params last = params(hidden, last_weight, last_bias, out, num_rows, width, outer);
  last.x.norm = {s.norm, nullptr, s.columns};
  return product<Change::norm, Leave::none, false>(last, stream);
}

cudaError_t normed_layers_backward(Workspace& workspace, const void* x, const void* weight, const void* last_weight,
                                   const void* hidden, const void* norm, const void* grad, void* grad_x,
                                   void* grad_weight, void* grad_gamma, void* grad_beta, void* grad_last_weight,
                                   void* grad_last_bias, int64_t num_rows, int64_t inner, int64_t width, int64_t outer,
                                   cudaStream_t stream) {
  const int64_t bytes = static_cast<int64_t>(sizeof(float));
  Statistics s{};
  s.tiles = ceil_div(num_rows, Config::rows);
  s.num_rows = num_rows;
  s.columns = static_cast<int>(width);
  s.norm = static_cast<float*>(const_cast<void*>(norm));
  s.slopes = static_cast<float*>(workspace.take(2 * width * bytes));
  s.grad_gamma = static_cast<float*>(grad_gamma);
  s.grad_beta = static_cast<float*>(grad_beta);
  const Norm normed{s.norm, s.slopes, s.columns};
  void* const of_hidden = workspace.take(num_rows * width * bytes);
  Params gate = params(grad, last_weight, nullptr, of_hidden, num_rows, outer, width);
  gate.left = static_cast<float*>(workspace.take(s.tiles * 2 * width * bytes));
  gate.hidden = static_cast<const float*>(hidden);
  gate.norm = normed;
  s.left = gate.left;
  cudaError_t status = product<Change::none, Leave::gated, true>(gate, stream);
  if (status != cudaSuccess) return status;
  slopes_kernel<<<dim3(sum_blocks(width)), Config::sum_threads, 0, stream>>>(s);
  Matrix made = matrix(hidden, width), back = matrix(of_hidden, width);
  made.norm = back.norm = normed;
  back.other = made.data;
  if (grad_last_weight != nullptr) {
    status = weights<Change::norm>(workspace, made, matrix(grad, outer), true, grad_last_weight, grad_last_bias,
                                   num_rows, stream);
    if (status != cudaSuccess) return status;
  }
  if (grad_weight != nullptr) {
    status = weights<Change::back>(workspace, back, matrix(x, inner), false, grad_weight, nullptr, num_rows, stream);
  }
  if (status != cudaSuccess || grad_x == nullptr) return status;
  Params down = params(of_hidden, weight, nullptr, grad_x, num_rows, width, inner);
  down.x = back;
  return product<Change::back, Leave::none, true>(down, stream);
}

}  // namespace cuda
}  // namespace gnnaccel
