// Sums weighted by a softmax that is not known yet (online softmax: Milakov and Gimelshein, 2018), and by factors of
// edges.
#pragma once

#include "common.cuh"

namespace gnnaccel {
namespace cuda {

// What weights of edges are multiplied with (types.h).
template <typename T>
struct EdgeFactors {
  const T* scale;
  const uint64_t* seed;
  uint32_t threshold;
  Acc<T> kept;  // what a dropout makes of 1

  EdgeFactors() = default;
  explicit EdgeFactors(const EdgeFactor& from)
      : scale(static_cast<const T*>(from.scale)),
        seed(static_cast<const uint64_t*>(from.seed)),
        threshold(dropout_threshold(from.dropout)),
        kept(static_cast<Acc<T>>(1 / (1 - from.dropout))) {}

  __device__ __forceinline__ bool any() const { return scale || seed; }
  // `weight`: edge * heads + head.
  __device__ __forceinline__ Acc<T> of(int64_t weight) const {
    Acc<T> factor = scale ? load_one(scale + weight) : Acc<T>(1);
    if (seed) factor *= dropout_bits(__ldg(seed), static_cast<uint64_t>(weight)) < threshold ? Acc<T>(0) : kept;
    return factor;
  }
};

// Sums over some nonzeros of a row, for one head and N features, all relative to exp(top).
template <typename A, int N>
struct Softmax {
  A top;
  A sum;
  A sum_pos;
  A value[N];
  A value_pos[N];

  __device__ __forceinline__ void clear() {
    top = -INFINITY;
    sum = sum_pos = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = value_pos[i] = 0;
  }
  // Makes `other` what everything is relative to.
  __device__ __forceinline__ void raise(A other) {
    const A factor = top == -INFINITY ? A(0) : exp(top - other);
    top = other;
    sum *= factor;
    sum_pos *= factor;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      value[i] *= factor;
      value_pos[i] *= factor;
    }
  }
  // exp of a score that is at most `top`; of scores that are all -inf it is 0, and the row becomes 0 / 0.
  __device__ __forceinline__ A weigh(A score) const { return exp(score - (top == -INFINITY ? A(0) : top)); }
  __device__ __forceinline__ void merge(Softmax other) {
    if (other.top > top) {
      raise(other.top);
    } else if (top > other.top) {
      other.raise(top);
    }
    sum += other.sum;
    sum_pos += other.sum_pos;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      value[i] += other.value[i];
      value_pos[i] += other.value_pos[i];
    }
  }
};

}  // namespace cuda
}  // namespace gnnaccel
