// Sums of segments weighted by a softmax of each feature over its segment (SoftmaxAggregation as a readout of a batch
// of graphs), and their gradients, in one launch each. A block takes 32 features of a segment, a warp of it every
// so-manyeth row; what the warps have found meets in shared memory, in a fixed order. A segment is read twice forward,
// from L1 the second time, and once backward, where weights are made again from two numbers for each feature.
#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

struct Config {
  static constexpr int warps = 8;
  static constexpr int threads = warps * 32;
};

template <typename T, typename I>
struct Params {
  const I* offsets;   // [segments + 1]
  const T* x;         // [rows, width]
  const Acc<T>* t;    // [1 or width], or null: scale
  T* out;             // [segments, width]
  Acc<T>* stats;      // [3, segments, width]
  const T* grad_out;  // [segments, width]
  T* grad_x;          // [rows, width]
  Acc<T>* grad_t;     // [segments, width], or null
  int64_t num_segments;
  int width;
  bool one_t;
  bool constant;
  Acc<T> scale;

  __device__ __forceinline__ Acc<T> factor(int d) const { return t ? __ldg(t + (one_t ? 0 : d)) : scale; }
};

template <typename T, typename I>
__global__ void __launch_bounds__(Config::threads) forward_kernel(const Params<T, I> p) {
  using A = Acc<T>;
  __shared__ A shared[2][Config::warps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int d = static_cast<int>(blockIdx.y) * 32 + lane;
  const bool active = d < p.width;
  const int64_t segment = blockIdx.x, begin = p.offsets[segment], end = p.offsets[segment + 1];
  const A t = active ? p.factor(d) : A(0);
  A top = -INFINITY;
  for (int64_t row = begin + warp; active && row < end; row += Config::warps) {
    const A z = t * load_one(p.x + row * p.width + d);
    top = z > top ? z : top;
  }
  shared[0][warp][lane] = top;
  __syncthreads();
#pragma unroll
  for (int other = 0; other < Config::warps; ++other) {
    const A z = shared[0][other][lane];
    top = z > top ? z : top;
  }
  A sum = 0, weighted = 0;
  for (int64_t row = begin + warp; active && row < end; row += Config::warps) {
    const A x = load_one(p.x + row * p.width + d), weight = exp(t * x - top);
    sum += weight;
    weighted += weight * x;
  }
  __syncthreads();
  shared[0][warp][lane] = sum;
  shared[1][warp][lane] = weighted;
  __syncthreads();
  if (warp || !active) return;
  for (int other = 1; other < Config::warps; ++other) {
    sum += shared[0][other][lane];
    weighted += shared[1][other][lane];
  }
  const bool empty = begin == end;
  const A inverse = empty ? A(0) : A(1) / sum;
  const int64_t at = segment * p.width + d;
  const A out = weighted * inverse;
  p.out[at] = narrow<T>(out);
  p.stats[at] = empty ? A(0) : top;
  p.stats[p.num_segments * p.width + at] = inverse;
  p.stats[2 * p.num_segments * p.width + at] = out;
}

template <typename T, typename I>
__global__ void __launch_bounds__(Config::threads) backward_kernel(const Params<T, I> p) {
  using A = Acc<T>;
  __shared__ A shared[Config::warps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int d = static_cast<int>(blockIdx.y) * 32 + lane;
  const bool active = d < p.width;
  const int64_t segment = blockIdx.x, begin = p.offsets[segment], end = p.offsets[segment + 1];
  const int64_t at = segment * p.width + d;
  A t = 0, grad = 0, out = 0, top = 0, inverse = 0, of_t = 0;
  if (active) {
    t = p.factor(d);
    grad = load_one(p.grad_out + at);
    top = p.stats[at];
    inverse = p.stats[p.num_segments * p.width + at];
    out = p.stats[2 * p.num_segments * p.width + at];
  }
  for (int64_t row = begin + warp; active && row < end; row += Config::warps) {
    const A x = load_one(p.x + row * p.width + d), apart = x - out;
    const A part = grad * (exp(t * x - top) * inverse);
    of_t += part * apart * apart;  // as the sum of part * apart is 0
    p.grad_x[row * p.width + d] = narrow<T>(p.constant ? part : part + part * t * apart);
  }
  if (!p.grad_t) return;
  shared[warp][lane] = of_t;
  __syncthreads();
  if (warp || !active) return;
  for (int other = 1; other < Config::warps; ++other) of_t += shared[other][lane];
  p.grad_t[at] = of_t;
}

template <typename T, typename I>
Params<T, I> params_of(const Csr& segments, const void* x, const void* t, double scale, int64_t num_t, int64_t width) {
  Params<T, I> p{};
  p.offsets = static_cast<const I*>(segments.indptr);
  p.x = static_cast<const T*>(x);
  p.t = static_cast<const Acc<T>*>(t);
  p.num_segments = segments.num_rows;
  p.width = static_cast<int>(width);
  p.one_t = num_t == 1;
  p.scale = static_cast<Acc<T>>(scale);
  return p;
}

dim3 grid_of(const Csr& segments, int64_t width) {
  return dim3(static_cast<unsigned>(segments.num_rows), static_cast<unsigned>(ceil_div(width, 32)));
}

}  // namespace

cudaError_t segment_softmax(const Csr& segments, const void* x, const void* t, double scale, int64_t num_t, void* out,
                            void* stats, int64_t width, DType dtype, cudaStream_t stream) {
  if (segments.num_rows == 0 || width == 0) return cudaSuccess;
  return with_types(dtype, segments.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p = params_of<T, I>(segments, x, t, scale, num_t, width);
    p.out = static_cast<T*>(out);
    p.stats = static_cast<Acc<T>*>(stats);
    forward_kernel<T, I><<<grid_of(segments, width), Config::threads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

cudaError_t segment_softmax_backward(const Csr& segments, const void* x, const void* t, double scale, int64_t num_t,
                                     const void* stats, const void* grad_out, void* grad_x, void* grad_t, int64_t width,
                                     bool constant, DType dtype, cudaStream_t stream) {
  if (segments.num_rows == 0 || width == 0) return cudaSuccess;
  return with_types(dtype, segments.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p = params_of<T, I>(segments, x, t, scale, num_t, width);
    p.stats = static_cast<Acc<T>*>(const_cast<void*>(stats));
    p.grad_out = static_cast<const T*>(grad_out);
    p.grad_x = static_cast<T*>(grad_x);
    p.grad_t = static_cast<Acc<T>*>(grad_t);
    p.constant = constant;
    backward_kernel<T, I><<<grid_of(segments, width), Config::threads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace gnnaccel
