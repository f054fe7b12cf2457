// The factors of edges' weights as a tensor, where no kernel takes them as they are. Bandwidth decides: one build for
// all instruction sets.
#include <algorithm>

#include "kernels.h"
#include "parallel.h"

namespace gnnaccel {
namespace {

constexpr int64_t kChunk = 16384;

template <class T>
void write(const EdgeFactor& factor, T* out, int64_t count, int threads) {
  const auto* scale = static_cast<const T*>(factor.scale);
  const uint64_t seed = factor.seed ? *static_cast<const uint64_t*>(factor.seed) : 0;
  const uint32_t threshold = dropout_threshold(factor.dropout);
  const T kept = static_cast<T>(1 / (1 - factor.dropout));
  parallel_for((count + kChunk - 1) / kChunk, useful_threads(count * 4, threads), [&](int64_t t) {
    for (int64_t i = t * kChunk; i < std::min(count, (t + 1) * kChunk); ++i) {
      T value = scale ? scale[i] : T(1);
      if (factor.seed) value *= dropout_bits(seed, static_cast<uint64_t>(i)) < threshold ? T(0) : kept;
      out[i] = value;
    }
  });
}

}  // namespace

void edge_factor(const EdgeFactor& factor, void* out, int64_t count, DType dtype, int threads) {
  dtype == DType::f64 ? write(factor, static_cast<double*>(out), count, threads)
                      : write(factor, static_cast<float*>(out), count, threads);
}

}  // namespace gnnaccel
