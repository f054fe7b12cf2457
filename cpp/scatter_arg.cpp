// Backward of max and min on the CPU: each gradient goes to the one source or edge that won. No atomics:
// either the rows never share a target (edges), or a task owns a slice of the features.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace gnnaccel {
namespace {

constexpr int64_t kSlice = 16;  // features per task: a cache line of f32, so that two tasks share none

struct Bf16 {
  uint16_t bits;
  float get() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
  }
  Bf16& operator+=(const Bf16& other) {
    const float sum = get() + other.get();
    uint32_t wide;
    std::memcpy(&wide, &sum, 4);
    bits = sum != sum ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    return *this;
  }
};

template <class T, class I>
void run(const I* arg, const T* values, T* target, int64_t num_rows, int64_t num_feats, int64_t len, int64_t div,
         bool rows_disjoint, int threads) {
  const auto part = [&](int64_t row0, int64_t row1, int64_t d0, int64_t d1) {
    for (int64_t r = row0; r < row1; ++r)
      for (int64_t d = d0; d < d1; ++d) {
        const int64_t at = r * num_feats + d;
        if (arg[at] >= 0) target[static_cast<int64_t>(arg[at]) * len + (d / div) % len] += values[at];
      }
  };
  threads = useful_threads(num_rows * num_feats, threads);
  const int64_t tasks = rows_disjoint ? threads * int64_t{4} : (num_feats + kSlice - 1) / kSlice;
  parallel_for(tasks, threads, [&](int64_t t) {
    if (rows_disjoint)
      part(num_rows * t / tasks, num_rows * (t + 1) / tasks, 0, num_feats);
    else
      part(0, num_rows, t * kSlice, std::min(num_feats, (t + 1) * kSlice));
  });
}

template <class T>
void run_index(const void* arg, const void* values, void* target, int64_t num_rows, int64_t num_feats, int64_t len,
               int64_t div, bool rows_disjoint, IndexType index_type, int threads) {
  const auto* from = static_cast<const T*>(values);
  auto* to = static_cast<T*>(target);
  if (index_type == IndexType::i64)
    run(static_cast<const int64_t*>(arg), from, to, num_rows, num_feats, len, div, rows_disjoint, threads);
  else
    run(static_cast<const int32_t*>(arg), from, to, num_rows, num_feats, len, div, rows_disjoint, threads);
}

}  // namespace

void scatter_arg(const void* arg, const void* values, void* target, int64_t num_rows, int64_t num_feats, int64_t len,
                 int64_t div, bool rows_disjoint, IndexType index_type, DType dtype, int threads) {
  const auto run_type = dtype == DType::f64    ? run_index<double>
                        : dtype == DType::bf16 ? run_index<Bf16>
                                               : run_index<float>;
  run_type(arg, values, target, num_rows, num_feats, len, div, rows_disjoint, index_type, threads);
}

}  // namespace gnnaccel
