// Inner products of every row's heads with a few vectors, the node scores of additive attention, and their
// gradients. Memory-bound: x is read once for all vectors. grad_vectors is summed in chunks of rows of a fixed
// size whose partial results are added in order, so that it does not depend on the number of threads.
#include <algorithm>
#include <type_traits>

#include "isa.h"
#include "rows.h"
#include "simd.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

constexpr int64_t kChunk = 1024;  // rows to a task, and to one sum of grad_vectors in f64

constexpr int64_t kRows = 256;  // to one sum in T

template <int N, class T>
void forward(const HeadDotsArgs& a, int64_t row) {
  const int64_t feats = a.width / a.num_heads;
  const auto* x = static_cast<const T*>(a.x) + row * a.width;
  for (int64_t v = 0; v < a.num_vectors; ++v)
    for (int64_t h = 0; h < a.num_heads; ++h) {
      const auto* vector = static_cast<const T*>(a.vectors) + v * a.width + h * feats;
      Vec<T, N> sum{};
      for (int64_t d = 0; d < feats; d += N) sum += load<N>(x + h * feats + d) * load<N>(vector + d);
      static_cast<T*>(a.out)[(v * a.num_rows + row) * a.num_heads + h] = horizontal_sum<T, N>(sum);
    }
}

// Row's grad_x, and its part of grad_vectors into `partial` [num_vectors, width].
template <int N, class T>
void backward(const HeadDotsArgs& a, int64_t row, T* partial) {
  const int64_t feats = a.width / a.num_heads;
  const auto *x = static_cast<const T*>(a.x) + row * a.width, *vectors = static_cast<const T*>(a.vectors);
  auto* grad_x = static_cast<T*>(a.grad_x) + row * a.width;
  for (int64_t h = 0; h < a.num_heads; ++h)
    for (int64_t d = h * feats; d < (h + 1) * feats; d += N) {
      const Vec<T, N> value = load<N>(x + d);
      Vec<T, N> sum = a.add ? load<N>(grad_x + d) : Vec<T, N>{};
      for (int64_t v = 0; v < a.num_vectors; ++v) {
        const auto grad = splat<N>(static_cast<const T*>(a.grad_out)[(v * a.num_rows + row) * a.num_heads + h]);
        sum += grad * load<N>(vectors + v * a.width + d);
        store<N>(partial + v * a.width + d, load<N>(partial + v * a.width + d) + grad * value);
      }
      store<N>(grad_x + d, sum);
    }
}

template <int N, class T>
void run(const HeadDotsArgs& a) {
  const int64_t chunks = (a.num_rows + kChunk - 1) / kChunk, size = a.num_vectors * a.width;
  const int threads = useful_threads(a.num_rows * a.width, a.threads);
  if (!a.grad_out)
    return parallel_for(chunks, threads, [&](int64_t chunk) {
      for (int64_t row = chunk * kChunk; row < std::min(a.num_rows, (chunk + 1) * kChunk); ++row) forward<N, T>(a, row);
    });
  const Buffer<double> sums(chunks * size);
  parallel_for(chunks, threads, [&](int64_t chunk) {
    double* sum = sums.get() + chunk * size;
    std::fill(sum, sum + size, 0.0);
    const Buffer<T> piece(size);
    const int64_t last = std::min(a.num_rows, (chunk + 1) * kChunk);
    for (int64_t row = chunk * kChunk; row < last; row += kRows) {
      std::fill(piece.get(), piece.get() + size, T(0));
      for (int64_t r = row; r < std::min(last, row + kRows); ++r) backward<N, T>(a, r, piece.get());
      for (int64_t i = 0; i < size; ++i) sum[i] += piece[i];
    }
  });
  for (int64_t i = 0; i < size; ++i) {
    double total = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) total += sums[chunk * size + i];
    static_cast<T*>(a.grad_vectors)[i] = static_cast<T>(total);
  }
}

template <class T>
void pick(const HeadDotsArgs& a) {
  const int64_t feats = a.width / a.num_heads;
  if (feats % kLanes<T> == 0) return run<kLanes<T>, T>(a);
  if constexpr (kLanes<T> > 8)
    if (feats % 8 == 0) return run<8, T>(a);
  if constexpr (kLanes<T> > 4)
    if (feats % 4 == 0) return run<4, T>(a);
  run<1, T>(a);
}

}  // namespace

void head_dots(const HeadDotsArgs& a) { a.dtype == DType::f64 ? pick<double>(a) : pick<float>(a); }

}  // namespace gnnaccel::GNNACCEL_ISA
