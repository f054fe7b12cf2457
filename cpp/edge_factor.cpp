// The factors of edges' weights as a tensor, where no kernel takes them as they are. Bandwidth decides: one build for
// all instruction sets.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace gnnaccel {
namespace {

constexpr int64_t kChunk = 16384;

float widened(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint16_t narrowed(float value) {  // to the nearest, ties to even; no NaN comes here but from a NaN, which stays one
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// get(i) and set(i, value) of out's dtype.
template <class A, class Get, class Set>
void write(const EdgeFactor& factor, int64_t count, int threads, const Get& get, const Set& set) {
  const uint64_t seed = factor.seed ? *static_cast<const uint64_t*>(factor.seed) : 0;
  const uint32_t threshold = dropout_threshold(factor.dropout);
  const A kept = static_cast<A>(1 / (1 - factor.dropout));
  parallel_for((count + kChunk - 1) / kChunk, useful_threads(count * 4, threads), [&](int64_t t) {
    for (int64_t i = t * kChunk; i < std::min(count, (t + 1) * kChunk); ++i) {
      A value = factor.scale ? get(i) : A(1);
      if (factor.seed) value *= dropout_bits(seed, static_cast<uint64_t>(i)) < threshold ? A(0) : kept;
      set(i, value);
    }
  });
}

template <class T>
void write(const EdgeFactor& factor, void* out, int64_t count, int threads) {
  write<T>(
      factor, count, threads, [&](int64_t i) { return static_cast<const T*>(factor.scale)[i]; },
      [&](int64_t i, T value) { static_cast<T*>(out)[i] = value; });
}

}  // namespace

void edge_factor(const EdgeFactor& factor, void* out, int64_t count, DType dtype, int threads) {
  if (dtype == DType::f64) return write<double>(factor, out, count, threads);
  if (dtype == DType::f32) return write<float>(factor, out, count, threads);
  write<float>(
      factor, count, threads, [&](int64_t i) { return widened(static_cast<const uint16_t*>(factor.scale)[i]); },
      [&](int64_t i, float value) { static_cast<uint16_t*>(out)[i] = narrowed(value); });
}

}  // namespace gnnaccel
