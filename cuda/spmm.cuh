// What the SpMM kernels share: the arguments of one call, and the kernels' entries. spmm.cu chooses between them.
#pragma once

#include "common.cuh"

namespace gnnaccel {
namespace cuda {

// The arguments of spmm (kernels.h), checked: lhs and rhs are null where the message does not read them.
struct SpmmCall {
  Csr graph;
  WorkList work;
  Operand lhs;
  Operand rhs;
  void* out;
  void* arg_lhs;
  void* arg_rhs;
  int64_t num_feats;
  Message message;
  Reduce reduce;
  DType dtype;
  double empty_value;
  void* workspace;

  bool extreme() const { return reduce == Reduce::max || reduce == Reduce::min; }
};

// How the edges of a row scale its sources in the kernels of the common messages.
enum class Weight { none, scalar, heads };

// A slice of features for one group of lanes, 16 bytes a lane, in the kernels of the common messages.
struct Slice {
  int lanes;       // 4, 8, 16 or 32; 0 if these kernels cannot serve the call
  int64_t slices;  // of the features
};

// What the kernels below want: a copied or scaled source, every address aligned to 16 bytes.
Slice slice_of(const SpmmCall& call, int max_lanes);

inline Weight weight_of(const SpmmCall& call) {
  return call.message == Message::copy_lhs ? Weight::none : call.rhs.len == 1 ? Weight::scalar : Weight::heads;
}

// Rows taken whole from a work list (spmm_rows.cu).
int64_t spmm_rows_workspace_bytes(const SpmmCall& call);
cudaError_t spmm_rows(const SpmmCall& call, Slice slice, cudaStream_t stream);

// Equal nonzeros for every worker (spmm_balanced.cu).
int64_t spmm_balanced_workspace_bytes(const SpmmCall& call, Slice slice);
cudaError_t spmm_balanced(const SpmmCall& call, Slice slice, cudaStream_t stream);

// Every message, reduction and alignment (spmm_general.cu).
int64_t spmm_general_workspace_bytes(const SpmmCall& call);
cudaError_t spmm_general(const SpmmCall& call, cudaStream_t stream);

// N values of a lane, accumulated.
template <typename T, int N>
struct Sums {
  Acc<T> value[N];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = 0;
  }
  __device__ __forceinline__ void add(const Pack<T, N>& x) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] += widen(x.values[i]);
  }
  __device__ __forceinline__ void add(Acc<T> weight, const Pack<T, N>& x) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] += weight * widen(x.values[i]);
  }
  __device__ __forceinline__ void add(const Sums& other) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] += other.value[i];
  }
  // The finished row: its mean, or the value of a row without nonzeros.
  __device__ __forceinline__ void write(T* to, int64_t degree, bool mean, double empty_value) const {
    Pack<T, N> out;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Acc<T> x = degree == 0 ? static_cast<Acc<T>>(empty_value) : value[i];
      if (mean && degree > 1) x /= static_cast<Acc<T>>(degree);
      out.values[i] = narrow<T>(x);
    }
    store(to, out);
  }
};

// Calls f with the number of lanes, at most MAX_LANES, and the kind of weight as integral constants.
template <int MAX_LANES, typename F>
cudaError_t with_shape(int lanes, Weight weight, F f) {
  auto with_weight = [&](auto lanes_) {
    switch (weight) {
      case Weight::none:
        return f(lanes_, std::integral_constant<Weight, Weight::none>{});
      case Weight::scalar:
        return f(lanes_, std::integral_constant<Weight, Weight::scalar>{});
      default:
        return f(lanes_, std::integral_constant<Weight, Weight::heads>{});
    }
  };
  switch (lanes) {
    case 4:
      return with_weight(std::integral_constant<int, 4>{});
    case 8:
      return with_weight(std::integral_constant<int, 8>{});
    case 16:
      return with_weight(std::integral_constant<int, 16>{});
    case 32:
      if constexpr (MAX_LANES >= 32) return with_weight(std::integral_constant<int, 32>{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace cuda
}  // namespace gnnaccel
