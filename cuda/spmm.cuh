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
  Fused fused;
  void* workspace;

  bool extreme() const { return reduce == Reduce::max || reduce == Reduce::min; }
  // Of padded sources, with results that are not (with_padded_sources).
  bool has_padded_sources() const { return lhs.len > num_feats; }
  bool ragged() const {
    const auto address = reinterpret_cast<uintptr_t>(out);
    return has_padded_sources() && (num_feats % (16 / size_of(dtype)) || address % 16);
  }
  // Of one feature of a part of a row, in the workspace; positions have `position_bytes`.
  int64_t part_bytes(int position_bytes) const { return accumulator_size(dtype) + (extreme() ? position_bytes : 0); }
};

// How the edges of a row scale its sources in the kernels of the common messages. fused: by a weight each, or none,
// times what Fused has for the source, and an epilogue; a kind of its own, as its branches would cost the others: those
// around the source up to a fifth (H200, 16 features), those of the epilogue 1 to 10 % (yeast-like, 128).
enum class Weight { none, scalar, heads, fused };
template <Weight WEIGHT>
constexpr bool one_for_all_features = WEIGHT == Weight::scalar || WEIGHT == Weight::fused;

constexpr int64_t kReadOften = 32;   // nonzeros for each row and column, from which on copies of both cost little
constexpr int kMaxSpreadLanes = 16;  // of a slice whose lanes' values lie apart

// A slice of features for one group of lanes, 16 bytes a lane, in the kernels of the common messages.
struct Slice {
  int lanes;       // 4, 8, 16 or 32; 0 if these kernels cannot serve the call
  int64_t slices;  // of the features
  bool spread;     // a lane's values lie `lanes` apart, and are loaded one by one: any width, along a list
};

inline Weight weight_of(const SpmmCall& call) {
  if (!call.fused.empty()) return Weight::fused;
  if (call.message == Message::copy_lhs) return Weight::none;
  return call.rhs.len == 1 ? Weight::scalar : Weight::heads;
}

// Rows taken whole from a work list (spmm_rows.cu).
int64_t spmm_rows_workspace_bytes(const SpmmCall& call);
cudaError_t spmm_rows(const SpmmCall& call, Slice slice, cudaStream_t stream);

// Sums and means by groups of neighbours, along a list of these (spmm_groups.cu).
int64_t spmm_groups_workspace_bytes(const SpmmCall& call);
cudaError_t spmm_groups(const SpmmCall& call, Slice slice, cudaStream_t stream);

// Equal nonzeros for every worker (spmm_balanced.cu).
int64_t spmm_balanced_workspace_bytes(const SpmmCall& call, Slice slice);
cudaError_t spmm_balanced(const SpmmCall& call, Slice slice, cudaStream_t stream);

// Sums and means of one to four features (spmm_narrow.cu); those of edges as a call whose sources they are.
SpmmCall spmm_of_edges(const SpmmCall& given);
bool spmm_narrow_serves(const SpmmCall& call, bool of_edges);
int64_t spmm_narrow_workspace_bytes(const SpmmCall& call);
cudaError_t spmm_narrow(const SpmmCall& call, cudaStream_t stream);

// A call as the kernels above are to have it whose features are no whole number of vectors for each weight, or of lines
// (spmm_pad.cu): padded, with copies at the head of its workspace, where they take `bytes`; 0, and the call as it is,
// if that would not pay. listed: by a work list. spmm_pad writes what the kernel reads, spmm_unpad takes out what it
// wrote.
SpmmCall padded(const SpmmCall& given, bool listed, int64_t& bytes);
// The same with copies of the sources alone, for kernels along a list, which write rows of any width.
SpmmCall with_padded_sources(const SpmmCall& given, int64_t& bytes);
cudaError_t spmm_pad(const SpmmCall& given, const SpmmCall& call, cudaStream_t stream);
cudaError_t spmm_unpad(const SpmmCall& given, const SpmmCall& call, cudaStream_t stream);

// Every message, reduction and alignment (spmm_general.cu).
int64_t spmm_general_workspace_bytes(const SpmmCall& call);
cudaError_t spmm_general(const SpmmCall& call, cudaStream_t stream);

// Fused (types.h) in the types of a kernel: what scales sources ...
template <typename T, typename I>
struct SourceScale {
  const Acc<T>* scale;
  const I* indptr;

  static SourceScale of(const Fused& f) {
    return {static_cast<const Acc<T>*>(f.source_scale), static_cast<const I*>(f.source_indptr)};
  }
  __device__ __forceinline__ Acc<T> operator[](I source) const {
    if (scale) return __ldg(scale + source);
    if (!indptr) return 1;
    const Acc<T> degree = static_cast<Acc<T>>(__ldg(indptr + source + 1) - __ldg(indptr + source));
    if constexpr (sizeof(Acc<T>) == 4) {
      return __fdividef(1, degree);  // within 2 ulp, and without the registers of an exact division
    } else {
      return 1 / degree;
    }
  }
};
// ... and what becomes of a finished sum.
template <typename T>
struct Epilogue {
  const Acc<T>* row_scale;
  const void* bias;  // of T, or of Acc<T> where results are wide
  const T* own;
  const Acc<T>* own_factor;
  bool relu;
  bool wide;

  static Epilogue of(const Fused& f) {
    return {static_cast<const Acc<T>*>(f.row_scale),  f.bias, static_cast<const T*>(f.own),
            static_cast<const Acc<T>*>(f.own_factor), f.relu, f.wide};
  }
  __device__ __forceinline__ bool is_wide() const { return sizeof(T) == 2 && wide; }
  // own_value: what the row itself has of this feature.
  __device__ __forceinline__ Acc<T> operator()(Acc<T> x, int64_t row, int64_t d, T own_value = {}) const {
    if (row_scale) x *= __ldg(row_scale + row);
    if (own) x += __ldg(own_factor) * widen(own_value);
    if (bias) x += is_wide() ? __ldg(static_cast<const Acc<T>*>(bias) + d) : load_one(static_cast<const T*>(bias) + d);
    return relu && x < 0 ? 0 : x;
  }
};

// What scales the source of a nonzero where all features have one weight.
template <typename T, Weight WEIGHT, typename I, typename P>
__device__ __forceinline__ Acc<T> scale_of(const P& p, I source, I edge) {
  auto weight = [&]() { return load_one(static_cast<const T*>(p.rhs.data) + edge); };
  if constexpr (WEIGHT == Weight::fused) {
    const Acc<T> scale = p.source_scale[source];
    return p.rhs.data ? scale * weight() : scale;
  } else {
    return weight();
  }
}

// What the kernels add up. Their Params have in common: out, num_feats, mean, empty_value and epilogue, and where they
// serve max and min also arg_lhs, arg_rhs, indices, edge_ids and sign (-1 for min, else 1). K holds positions of
// nonzeros.

// Parts of rows, in the workspace.
template <typename T, typename K>
struct Parts {
  Acc<T>* values;  // [parts, num_feats]
  K* where;        // the same for max and min: position of the winner
};

// Whether all that lanes write are whole vectors. Kernels that gather from padded sources (ListParams) may have others.
template <typename P>
__device__ __forceinline__ auto in_vectors(const P& p, int) -> decltype(!p.ragged) {
  return !p.ragged;
}
template <typename P>
__device__ __forceinline__ bool in_vectors(const P&, long) {
  return true;
}

// Writes a lane's values of one row: of features d, d + STRIDE .., one by one where they are no neighbours or no
// vectors.
template <int STRIDE, typename T, int N, typename P>
__device__ __forceinline__ void store_values(const P& p, T* row, int64_t d, const T (&from)[N]) {
  constexpr int n = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
  const int64_t num_feats = p.num_feats;
  if (STRIDE == 1 && in_vectors(p, 0)) {
#pragma unroll
    for (int first = 0; first < N; first += n) {
      Pack<T, n> vector;
#pragma unroll
      for (int i = 0; i < n; ++i) vector.values[i] = from[first + i];
      store(row + d + first, vector);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (d + i * STRIDE < num_feats) row[d + i * STRIDE] = from[i];
    }
  }
}

// Reads them.
template <int STRIDE, typename T, int N, typename P>
__device__ __forceinline__ void load_values(const P& p, const T* row, int64_t d, Pack<T, N>& to) {
  const int64_t num_feats = p.num_feats;
  if (STRIDE == 1 && in_vectors(p, 0)) return load(row + d, to);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    Pack<T, 1> one;
    one.raw = {};
    if (d + i * STRIDE < num_feats) load(row + d + i * STRIDE, one);
    to.values[i] = one.values[0];
  }
}

// N values of a lane, accumulated; of features STRIDE apart.
template <typename T, typename K, int N, int STRIDE = 1>
struct Sums {
  static constexpr bool extreme = false;
  Acc<T> value[N];

  __device__ __forceinline__ void clear(K = 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = 0;
  }
  __device__ __forceinline__ void take(int i, Acc<T> x, K) { value[i] += x; }
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
  // The finished row: its mean, or the value of a row without nonzeros, and EPILOGUE: what becomes of that.
  template <bool EPILOGUE, typename P>
  __device__ __forceinline__ void write(const P& p, int64_t row, int64_t d, int64_t degree) const {
    Acc<T> out[N];
    Pack<T, N> own;
    const int64_t at = row * p.num_feats;
    own.raw = {};
    if constexpr (EPILOGUE) {
      if (p.epilogue.own) load_values<STRIDE>(p, p.epilogue.own + at, d, own);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      Acc<T> x = degree == 0 ? static_cast<Acc<T>>(p.empty_value) : value[i];
      if (p.mean && degree > 1) x /= static_cast<Acc<T>>(degree);
      const bool there = (STRIDE == 1 && in_vectors(p, 0)) || d + i * STRIDE < p.num_feats;
      out[i] = EPILOGUE && there ? p.epilogue(x, row, d + i * STRIDE, own.values[i]) : x;
    }
    if constexpr (EPILOGUE && sizeof(T) == 2) {
      if (p.epilogue.wide) return store_values<STRIDE>(p, reinterpret_cast<Acc<T>*>(p.out) + at, d, out);
    }
    T rounded[N];
#pragma unroll
    for (int i = 0; i < N; ++i) rounded[i] = narrow<T>(out[i]);
    store_values<STRIDE>(p, p.out + at, d, rounded);
  }
  // Feature d of a part of a row of `num_feats`.
  __device__ __forceinline__ void write_part(const Parts<T, K>& to, int64_t part, int64_t d, int64_t num_feats) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (N == 1 || d + i * STRIDE < num_feats) to.values[part * num_feats + d + i * STRIDE] = value[i];
    }
  }
};

// True if x takes the place of y as a maximum: NaN wins, the earlier one stays on a tie. A minimum is the
// maximum of the negated values, which is what Extremes, the workspace and Combined hold.
template <typename A>
__device__ __forceinline__ bool beats(A x, A y) {
  return !(x <= y) && y == y;
}

// Writes what won N features of a row from d on: column and edge id of the nonzeros `where`, -1 in a row without any.
template <int STRIDE, typename K, int N, typename P>
__device__ __forceinline__ void write_winners(const P& p, int64_t row, int64_t d, const K (&where)[N], int64_t degree) {
  using I = std::remove_pointer_t<decltype(p.arg_lhs)>;
  constexpr int n = STRIDE > 1 ? 1 : N * sizeof(I) > 16 ? 16 / sizeof(I) : N;
  auto write = [&](I* to, const I* names) {
    Pack<I, n> argmax;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int64_t last = d + i * STRIDE;
      argmax.values[i % n] = degree == 0 ? I{-1} : names ? __ldg(names + where[i]) : static_cast<I>(where[i]);
      if (STRIDE == 1 && in_vectors(p, 0)) {
        if (i % n == n - 1) store(to + row * p.num_feats + last - (n - 1), argmax);
      } else if (last < p.num_feats) {
        to[row * p.num_feats + last] = argmax.values[i % n];
      }
    }
  };
  if (p.arg_lhs) write(p.arg_lhs, p.indices);
  if (p.arg_rhs) write(p.arg_rhs, p.edge_ids);
}

// N maxima of a lane, and the nonzero that won each. Values arrive times p.sign.
template <typename T, typename K, int N, int STRIDE = 1>
struct Extremes {
  static constexpr bool extreme = true;
  Acc<T> value[N];
  K where[N];

  // `first`: the first nonzero to come, which wins if all are -inf.
  __device__ __forceinline__ void clear(K first) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      value[i] = -INFINITY;
      where[i] = first;
    }
  }
  __device__ __forceinline__ void take(int i, Acc<T> x, K k) {
    if (beats(x, value[i])) {
      value[i] = x;
      where[i] = k;
    }
  }
  __device__ __forceinline__ void add(Acc<T> weight, const Pack<T, N>& x, K k) {
#pragma unroll
    for (int i = 0; i < N; ++i) take(i, weight * widen(x.values[i]), k);
  }
  template <bool, typename P>
  __device__ __forceinline__ void write(const P& p, int64_t row, int64_t d, int64_t degree) const {
    Pack<T, N> out;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      out.values[i] = narrow<T>(degree == 0 ? static_cast<Acc<T>>(p.empty_value) : value[i] * p.sign);
    }
    store_values<STRIDE>(p, p.out + row * p.num_feats, d, out.values);
    write_winners<STRIDE>(p, row, d, where, degree);
  }
  __device__ __forceinline__ void write_part(const Parts<T, K>& to, int64_t part, int64_t d, int64_t num_feats) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (d + i * STRIDE >= num_feats) continue;
      to.values[part * num_feats + d + i * STRIDE] = value[i];
      to.where[part * num_feats + d + i * STRIDE] = where[i];
    }
  }
};

template <typename T, typename K, int N, bool EXTREME, int STRIDE = 1>
using Result = std::conditional_t<EXTREME, Extremes<T, K, N, STRIDE>, Sums<T, K, N, STRIDE>>;

// One feature of a row of which there are parts. A sum in f64: of a hub there are as many parts as nonzeros of others.
template <typename T, typename K, bool EXTREME>
struct Combined {
  using Value = std::conditional_t<EXTREME, Acc<T>, double>;
  Value value = 0;
  K where = -1;

  __device__ __forceinline__ void merge(Value x, K k) {
    if constexpr (EXTREME) {
      if (k < 0) return;
      // Parts may come out of order: on a tie (or two NaN) the earlier nonzero wins.
      const bool tie = x == value || (x != x && value != value);
      if (where < 0 || beats(x, value) || (tie && k < where)) {
        value = x;
        where = k;
      }
    } else {
      value += x;
    }
  }

  // Merges parts first, first + step .. before `end`, of which place(part) says where they are.
  template <typename J, typename F>
  __device__ __forceinline__ void read(const Parts<T, K>& parts, J first, J end, J step, F place) {
#pragma unroll 4
    for (J part = first; part < end; part += step) {
      const int64_t at = place(part);
      merge(parts.values[at], EXTREME ? parts.where[at] : K{-1});
    }
  }

  // Merges what the warps of a block have into the first one's; all threads call it together.
  template <int WARPS>
  __device__ __forceinline__ void merge_warps() {
    __shared__ Value values[WARPS][32];
    __shared__ K wheres[EXTREME ? WARPS : 1][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();  // the row before has been read
    values[warp][lane] = value;
    if constexpr (EXTREME) wheres[warp][lane] = where;
    __syncthreads();
    if (warp) return;
    for (int other = 1; other < WARPS; ++other) merge(values[other][lane], EXTREME ? wheres[other][lane] : K{-1});
  }

  template <typename P>
  __device__ __forceinline__ void write(const P& p, int64_t row, int64_t d, int64_t degree) const {
    Result<T, K, 1, EXTREME> result;
    result.value[0] = static_cast<Acc<T>>(value);
    if constexpr (EXTREME) result.where[0] = where;
    result.template write<true>(p, row, d, degree);
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
      case Weight::fused:
        return f(lanes_, std::integral_constant<Weight, Weight::fused>{});
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
