// Compressed rows and dense ones into each other: copies, for any dtype.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace gnnaccel {
namespace {

constexpr int64_t kChunk = 256;  // rows to a task

// Calls f(T{}, P{}) with an integer type of the dtype's size, and the type of places.
template <class F>
void with_bits(DType dtype, int64_t num_feats, const F& f) {
  const auto with_place = [&](auto bits) { num_feats <= 256 ? f(bits, uint8_t{}) : f(bits, uint16_t{}); };
  if (dtype == DType::f64) return with_place(uint64_t{});
  if (dtype == DType::f32) return with_place(uint32_t{});
  with_place(uint16_t{});
}

template <class Body>
void for_rows(int64_t num_rows, int64_t num_feats, int threads, const Body& body) {
  threads = useful_threads(num_rows * num_feats, threads);
  parallel_for((num_rows + kChunk - 1) / kChunk, threads, [&](int64_t chunk) {
    const int64_t last = std::min(num_rows, (chunk + 1) * kChunk);
    for (int64_t row = chunk * kChunk; row < last; ++row) body(row);
  });
}

}  // namespace

void expand(const Compressed& x, int64_t num_rows, void* out, DType dtype, int threads) {
  with_bits(dtype, x.num_feats, [&](auto bits, auto place) {
    using T = decltype(bits);
    const auto* values = static_cast<const T*>(x.values);
    const auto* places = static_cast<const decltype(place)*>(x.places);
    for_rows(num_rows, x.num_feats, threads, [&](int64_t row) {
      T* to = static_cast<T*>(out) + row * x.num_feats;
      std::memset(to, 0, sizeof(T) * x.num_feats);
      for (int64_t j = row * x.k; j < (row + 1) * x.k; ++j) to[places[j]] = values[j];
    });
  });
}

void collect(const void* x, int64_t num_rows, const Compressed& kept, DType dtype, int threads) {
  with_bits(dtype, kept.num_feats, [&](auto bits, auto place) {
    using T = decltype(bits);
    auto* values = static_cast<T*>(const_cast<void*>(kept.values));
    const auto* places = static_cast<const decltype(place)*>(kept.places);
    for_rows(num_rows, kept.num_feats, threads, [&](int64_t row) {
      const T* from = static_cast<const T*>(x) + row * kept.num_feats;
      for (int64_t j = row * kept.k; j < (row + 1) * kept.k; ++j) values[j] = from[places[j]];
    });
  });
}

}  // namespace gnnaccel
