// What becomes of a finished sum: the part of types.h's Fused that kernels on the CPU share.
#pragma once

#include "simd.h"
#include "types.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

// N features from d on of row `row`, which has `num_feats`; T is the storage type.
template <int N, class T>
inline Vec<Acc<T>, N> epilogue(const Fused& fused, Vec<Acc<T>, N> x, int64_t row, int64_t d, int64_t num_feats) {
  if (fused.row_scale) x *= static_cast<const Acc<T>*>(fused.row_scale)[row];
  if (fused.own) {
    x +=
        *static_cast<const Acc<T>*>(fused.own_factor) * load<N>(static_cast<const T*>(fused.own) + row * num_feats + d);
  }
  if (fused.bias) x += load<N>(static_cast<const T*>(fused.bias) + d);
  if (fused.relu) x = x < 0 ? splat<N>(Acc<T>(0)) : x;
  return x;
}

}  // namespace
}  // namespace gnnaccel::GNNACCEL_ISA
