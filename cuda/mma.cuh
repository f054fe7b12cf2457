// Matrix instructions of a warp: d [16, 8] += a [16, K] * b [K, 8], summed up in f32. Lane 4 * g + t holds of d the
// rows g and g + 8, columns 2 * t and 2 * t + 1 of each.
#pragma once

#include "common.cuh"

namespace gnnaccel {
namespace cuda {

// K = 8, in tf32: the lowest 13 bits of a and b do not count. The lane holds of a the rows g and g + 8 in column t and
// the same in column t + 4; of b the column g in rows t and t + 4.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// K = 16, of bf16 or f16, two to a register, the lower column or row of the two in its lower half. The lane holds of a
// the rows g and g + 8 in columns 2 * t and 2 * t + 1, and the same in columns 8 more; of b the column g in rows 2 * t
// and 2 * t + 1, and in 8 more.
template <typename T>
__device__ __forceinline__ void multiply_add_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The nearest tf32.
__device__ __forceinline__ uint32_t to_tf32(float value) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return rounded;
}

// A float as a sum of two tf32: its upper 11 bits, and of the rest the upper 11.
__device__ __forceinline__ void split(float value, uint32_t& high, uint32_t& low) {
  high = __float_as_uint(value) & 0xFFFFE000u;
  low = __float_as_uint(value - __uint_as_float(high));
}

// N neighbouring registers of 4 bytes, 1, 2 or 4, in one load.
template <int N>
__device__ __forceinline__ void load_words(const void* from, uint32_t* to) {
  Pack<uint32_t, N> words;
  load(static_cast<const uint32_t*>(from), words);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = words.values[i];
}

}  // namespace cuda
}  // namespace gnnaccel
