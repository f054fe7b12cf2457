// MaxK: of each row of x the k largest, in the order of the features (CBSR, types.h: Compressed).
//
// A warp has a row in registers (maxk.cuh). Rows of more than 1024 features and 64-bit values are halved from the
// start, read from memory each time. MaxK-GNN (Peng et al., 2024) halves values, which need not end at k.
#include "maxk.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxOwn = 32;  // features of a lane in registers
constexpr int kBlocks = 6;   // that a multiprocessor holds: with 8, in 32 registers, a third slower (H200)
constexpr int kWaves = 4;    // of those, so that warps with rows that take long do not end last

// The features that are kept of a row, in shared memory. The compiler derives an address of its own for every access
// (S2R, LEA, IMAD) unless it is a number that it knows nothing of.
template <typename P>
class Kept {
 public:
  __device__ __forceinline__ explicit Kept(P* row) {
#if defined(__CUDA_ARCH__)
    asm volatile("mov.u32 %0, %1;" : "=r"(row_) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
#else
    row_ = row;
#endif
  }
  __device__ __forceinline__ void start(int position) { to_ = row_ + position * kStep; }
  __device__ __forceinline__ uint32_t get(int position) const {
#if defined(__CUDA_ARCH__)
    uint32_t feature;
    if constexpr (sizeof(P) == 1) {
      asm volatile("ld.shared.u8 %0, [%1];" : "=r"(feature) : "r"(row_ + position) : "memory");
    } else {
      uint16_t narrow;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(narrow) : "r"(row_ + 2 * position) : "memory");
      feature = narrow;
    }
    return feature;
#else
    return row_[position];
#endif
  }
  __device__ __forceinline__ void put(bool kept, int feature) {
    if (!kept) return;
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(P) == 1) {
      asm volatile("st.shared.u8 [%0], %1;" ::"r"(to_), "r"(feature) : "memory");
    } else {
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(to_), "h"(static_cast<P>(feature)) : "memory");
    }
#else
    *to_ = static_cast<P>(feature);
#endif
    to_ += kStep;
  }

 private:
#if defined(__CUDA_ARCH__)
  static constexpr int kStep = sizeof(P);
  uint32_t row_, to_;
#else
  static constexpr int kStep = 1;
  P *row_, *to_;
#endif
};

template <typename T, typename P, int OWN, bool FULL>
__global__ void __launch_bounds__(kThreads, OWN <= 8 ? kBlocks : 2)
    registers_kernel(const T* x, int64_t num_rows, T* values, P* places, int num_feats, int k) {
  __shared__ P kept[kWarps][OWN * 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int there = FULL ? OWN : num_feats - lane * OWN;  // of the lane's features
  const int step = gridDim.x * kWarps;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  x += row * num_feats;
  values += row * k + lane;
  places += row * k + lane;
  const int x_step = step * num_feats, kept_step = step * k;
  Kept<P> list(kept[warp]);
  Guess guess;
  for (; row < num_rows; row += step, x += x_step, values += kept_step, places += kept_step) {
    float own[OWN];
    load_own<T, OWN, FULL>(x + lane * OWN, there, own);
    float cut, edge;
    int above, wrong;
    bool found = guess_cut(own, num_feats, k, guess, cut, above, wrong);
    edge = guess.at = cut;
    if (!found || !(fabsf(cut) <= 1e12f)) guess = {};  // a row like no other says nothing of the next
    if (wrong != 0) move_cut(own, wrong, cut, edge, above);
    const int end = sum_up_to(above);
    uint32_t taken = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) taken |= static_cast<uint32_t>(!(own[i] <= cut)) << i;
    // Lanes have counted wrongly with NaN, some ties and differences below 2^-80.
    found = found && __shfl_sync(~0u, end, 31) == k && __popc(taken) == above;
    int from = end - above;
    if (!__all_sync(~0u, found)) {
      taken = taken_with_ties<T, OWN, FULL>(x + lane * OWN, there, k, edge);
      from = sum_up_to(__popc(taken)) - __popc(taken);
    }
    list.start(from);
#pragma unroll
    for (int i = 0; i < OWN; ++i) list.put(taken >> i & 1, lane * OWN + i);
    __syncwarp();
    auto write = [&](int i) {
      if (lane + i >= k) return;
      const uint32_t place = list.get(lane + i);
      places[i] = static_cast<P>(place);
      values[i] = x[place];  // from L1
    };
    write(0);
#pragma unroll 1
    for (int i = 32; i < k; i += 32) write(i);
    __syncwarp();
  }
}

template <typename T, typename P>
__global__ void __launch_bounds__(kThreads)
    memory_kernel(const T* x, int64_t num_rows, T* values, P* places, int num_feats, int k) {
  using K = Key<T>;
  const int lane = threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < num_rows; row += step) {
    const T* from = x + row * num_feats;
    K low = 0;  // the largest key that k reach, bit by bit
    for (int bit = 8 * sizeof(K) - 1; bit >= 0; --bit) {
      const K key = low | K{1} << bit;
      int reach = 0;
      for (int i = lane; i < num_feats; i += 32) reach += key_of(load_one(from + i)) >= key;
      if (sum_of_warp(reach) >= k) low = key;
    }
    int above = 0;
    for (int i = lane; i < num_feats; i += 32) above += key_of(load_one(from + i)) > low;
    int equal = k - sum_of_warp(above);
    int64_t at = row * k;
    for (int first = 0; first < num_feats; first += 32) {
      const int i = first + lane;
      const K key = i < num_feats ? key_of(load_one(from + i)) : 0;
      const unsigned same = __ballot_sync(~0u, i < num_feats && key == low), before = (1u << lane) - 1;
      const bool taken = i < num_feats && (key > low || (key == low && __popc(same & before) < equal));
      const unsigned all = __ballot_sync(~0u, taken);
      if (taken) {
        values[at + __popc(all & before)] = from[i];
        places[at + __popc(all & before)] = static_cast<P>(i);
      }
      at += __popc(all);
      equal -= __popc(same) < equal ? __popc(same) : equal;
    }
  }
}

template <typename T, typename P>
cudaError_t launch(const T* x, int64_t num_rows, T* values, P* places, int num_feats, int k, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const int64_t blocks = ceil_div(num_rows, kWarps), most = static_cast<int64_t>(processors) * kBlocks * kWaves;
  const auto grid = static_cast<unsigned>(blocks < most ? blocks : most);
  auto in_registers = [&](auto own) {
    constexpr int bytes = own * sizeof(T) < 16 ? own * sizeof(T) : 16;
    if (num_feats == 32 * own && reinterpret_cast<uintptr_t>(x) % bytes == 0) {
      registers_kernel<T, P, own, true><<<grid, kThreads, 0, stream>>>(x, num_rows, values, places, num_feats, k);
    } else {
      registers_kernel<T, P, own, false><<<grid, kThreads, 0, stream>>>(x, num_rows, values, places, num_feats, k);
    }
    return cudaGetLastError();
  };
  if constexpr (sizeof(T) <= 4) {
    if (num_feats <= 64) return in_registers(std::integral_constant<int, 2>{});
    if (num_feats <= 128) return in_registers(std::integral_constant<int, 4>{});
    if (num_feats <= 256) return in_registers(std::integral_constant<int, 8>{});
    if constexpr (sizeof(P) == 2) {
      if (num_feats <= 512) return in_registers(std::integral_constant<int, 16>{});
      if (num_feats <= 32 * kMaxOwn) return in_registers(std::integral_constant<int, kMaxOwn>{});
    }
  }
  memory_kernel<T, P><<<grid, kThreads, 0, stream>>>(x, num_rows, values, places, num_feats, k);
  return cudaGetLastError();
}

}  // namespace

cudaError_t maxk(const void* x, int64_t num_rows, const Compressed& kept, DType dtype, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  return with_types(dtype, IndexType::i32, [&](auto value, auto) {
    using T = decltype(value);
    auto run = [&](auto place) {
      using P = decltype(place);
      auto* places = static_cast<P*>(const_cast<void*>(kept.places));
      return launch(static_cast<const T*>(x), num_rows, static_cast<T*>(const_cast<void*>(kept.values)), places,
                    static_cast<int>(kept.num_feats), static_cast<int>(kept.k), stream);
    };
    return kept.num_feats <= 256 ? run(uint8_t{}) : run(uint16_t{});
  });
}

}  // namespace cuda
}  // namespace gnnaccel
