// Matrix instructions of a warp.
#pragma once

#include "common.cuh"

namespace gnnaccel {
namespace cuda {

// d [16, 8] += a [16, 8] * b [8, 8] in tf32, summed up in f32. Lane 4 * g + t holds of a the rows g and g + 8 in column
// t and the same in column t + 4; of b the column g in rows t and t + 4; of d the rows g and g + 8, columns 2 * t and
// 2 * t + 1 of each. The lowest 13 bits of a and b do not count.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The nearest tf32.
__device__ __forceinline__ uint32_t to_tf32(float value) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return rounded;
}

}  // namespace cuda
}  // namespace gnnaccel
