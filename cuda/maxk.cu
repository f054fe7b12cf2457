// MaxK: of each row of x the k largest, in the order of the features (CBSR, types.h: Compressed).
//
// A warp takes a row into registers and looks for a value that k of them exceed: first where the row before was cut,
// then where as many would be added or lost as are missing, at the spacing of values met so far; after a few such
// guesses also between the closest two. Once a single one is wrong, the next larger one is dropped, or the next smaller
// one added. Three counts and half such a step a row where rows are alike, six where their scales differ (simulated).
// What equals the last of them is kept in part, the first ones; where that does not settle it (NaN, odd distributions)
// integers in the order of the values do, bit by bit. Prefix sums give each place its position in the row.
//
// Rows of more than 1024 features and 64-bit values are halved from the start, read from memory each time.
// MaxK-GNN (Peng et al., 2024) halves values, which need not end at k.
#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxOwn = 32;   // features of a lane in registers
constexpr int kGuesses = 16;  // before integers
constexpr int kBold = 3;      // of these by the spacing alone
constexpr int kClose = 1;     // as many wrong ones are dropped or added one by one
constexpr int kBlocks = 8;    // to a multiprocessor

template <typename T>
using Key = std::conditional_t<sizeof(T) == 8, unsigned long long, uint32_t>;

// Larger for larger values, equal for -0 and 0, largest for NaN; never 0.
__device__ __forceinline__ uint32_t key_of(float x) {
  if (x != x) return ~0u;
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 + 0 is 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ unsigned long long key_of(double x) {
  if (x != x) return ~0ull;
  const auto bits = static_cast<unsigned long long>(__double_as_longlong(x + 0.0));
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

__device__ __forceinline__ int sum_of_warp(int x) {
#if defined(__CUDA_ARCH__)
  return __reduce_add_sync(~0u, x);
#else
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
#endif
}

__device__ __forceinline__ uint32_t max_of_warp(uint32_t x) {
#if defined(__CUDA_ARCH__)
  return __reduce_max_sync(~0u, x);
#else
  for (int step = 16; step; step /= 2) {
    const uint32_t other = __shfl_xor_sync(~0u, x, step);
    if (other > x) x = other;
  }
  return x;
#endif
}

// Sum of x over the lanes before this one.
__device__ __forceinline__ int sum_before(int x) {
  const int lane = threadIdx.x % 32;
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  return sum - x;
}

// Where rows of a warp were cut last.
struct Guess {
  float at = 0;
  float spacing = 1;  // of the values around there
};

template <int OWN>
__device__ __forceinline__ int count_above(const float (&x)[OWN], float cut) {
  int above = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) above += x[i] > cut;
  return above;
}

// A value that k of the warp's values x exceed, by guesses; false if none was found. It is not looked for whether some
// equal `edge`, the last one that was dropped or added, but where TIES are usual.
template <bool TIES, int OWN>
__device__ __forceinline__ bool guess_cut(const float (&x)[OWN], int k, Guess& guess, float& cut, float& edge) {
  cut = guess.at;
  int wrong = sum_of_warp(count_above(x, cut)) - k;
  if (wrong > kClose || wrong < -kClose) {
    float last = 0, low = -INFINITY, high = INFINITY;  // too many exceed low, too few high
    int last_wrong = 0;
    for (int i = 0;; ++i) {
      if (i > 0) {
        const float met = __fdividef(cut - last, static_cast<float>(last_wrong - wrong)), known = guess.spacing;
        const bool odd = i >= kBold || met > 4 * known || 4 * met < known;
        if (met > 0 && met < 1e30f) guess.spacing = odd ? met : 0.75f * known + 0.25f * met;
      }
      (wrong > 0 ? low : high) = last = cut;
      last_wrong = wrong;
      cut += wrong * guess.spacing;
      if (i >= kBold && !(cut > low && cut < high)) cut = (low + high) / 2;
      wrong = sum_of_warp(count_above(x, cut)) - k;
      if (wrong <= kClose && wrong >= -kClose) break;
      if (i == kGuesses) return false;
    }
  }
  edge = cut;
  while (wrong > 0) {  // drop the smallest above the cut
    float next = INFINITY;
#pragma unroll
    for (int i = 0; i < OWN; ++i) next = fminf(next, x[i] > cut ? x[i] : INFINITY);
    edge = cut = value_of(~max_of_warp(~key_of(next)));
    wrong = TIES ? sum_of_warp(count_above(x, cut)) - k : wrong - 1;
    if (wrong <= 0) return true;
  }
  while (wrong < 0) {  // add the largest below it
    float next = -INFINITY;
#pragma unroll
    for (int i = 0; i < OWN; ++i) next = fmaxf(next, x[i] <= cut ? x[i] : -INFINITY);
    const uint32_t key = max_of_warp(key_of(next));
    edge = value_of(key);
    if (edge == -INFINITY) return true;                      // nothing lies below
    cut = value_of(key == 0x80000000u ? key - 2 : key - 1);  // no key stands for -0
    wrong = TIES ? sum_of_warp(count_above(x, cut)) - k : wrong + 1;
  }
  return true;
}

// The k-th largest key of a warp, and how many of those that equal it are among the k.
template <int OWN>
__device__ __forceinline__ uint32_t find_cut(const uint32_t (&keys)[OWN], int k, int& equal) {
  uint32_t low = 0;  // the largest that k reach, bit by bit
  for (int bit = 31; bit >= 0; --bit) {
    int reach = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) reach += keys[i] >= (low | 1u << bit);
    if (sum_of_warp(reach) >= k) low |= 1u << bit;
  }
  int above = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) above += keys[i] > low;
  equal = k - sum_of_warp(above);
  return low;
}

// The first `needed` of the warp's values that are marked in `equal`, a bit for each of a lane's.
__device__ __forceinline__ uint32_t first_of(uint32_t equal, int needed) {
  uint32_t taken = 0;
  needed -= sum_before(__popc(equal));
  for (; needed > 0 && equal; --needed, equal &= equal - 1) taken |= equal & (~equal + 1);
  return taken;
}

// Which of a lane's values are kept where some are equal to `edge`, if that settles it; else by integers.
template <int OWN>
__device__ __forceinline__ uint32_t taken_with_ties(const float (&x)[OWN], int there, int k, bool settles, float edge) {
  uint32_t taken = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    taken |= static_cast<uint32_t>(x[i] > edge) << i;
    equal |= static_cast<uint32_t>(x[i] == edge && i < there) << i;
  }
  const int needed = k - sum_of_warp(__popc(taken));
  if (settles && needed >= 0 && needed <= sum_of_warp(__popc(equal))) return taken | first_of(equal, needed);
  uint32_t keys[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) keys[i] = i < there ? key_of(x[i]) : 0;
  int equal_ones;
  const uint32_t key = find_cut(keys, k, equal_ones);
  taken = equal = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    taken |= static_cast<uint32_t>(keys[i] > key) << i;
    equal |= static_cast<uint32_t>(keys[i] == key) << i;
  }
  return taken | first_of(equal, equal_ones);
}

// FULL: rows of OWN features to each lane, aligned.
template <typename T, typename P, int OWN, bool FULL>
__global__ void __launch_bounds__(kThreads)
    registers_kernel(const T* x, int64_t num_rows, T* values, P* places, int num_feats, int k) {
  constexpr int V = OWN * sizeof(T) <= 16 ? OWN : 16 / sizeof(T);
  __shared__ P kept[kWarps][OWN * 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  const int there = FULL ? OWN : num_feats - lane * OWN;  // of the lane's features
  Pack<T, V> ahead[OWN / V];
  auto load_row = [&](int64_t row) {
    const T* from = x + row * num_feats + lane * OWN;
#pragma unroll
    for (int i = 0; i < OWN; i += V) {
      if constexpr (FULL) {
        if (row < num_rows) load(from + i, ahead[i / V]);
      } else {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          Pack<T, 1> one;
          one.raw = {};
          if (row < num_rows && i + j < there) load(from + i + j, one);
          ahead[i / V].values[j] = one.values[0];
        }
      }
    }
  };
  Guess guess;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  load_row(row);
  for (; row < num_rows; row += step) {
    float wide[OWN], sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      wide[i] = i < there ? widen(ahead[i / V].values[i % V]) : -INFINITY;
      sum += wide[i];
    }
    load_row(row + step);
    float cut, edge;
    const bool guessed = guess_cut<sizeof(T) == 2>(wide, k, guess, cut, edge);
    const int count = count_above(wide, cut);
    int at = sum_before(count);
    const bool exact = guessed && __shfl_sync(~0u, at + count, 31) == k;
    if (guessed && cut - cut == 0) guess.at = cut;  // a finite one
    const bool nan = __any_sync(~0u, sum != sum);   // or infinities of both signs
    P* places_of_row = kept[warp];
    if (exact && !nan) {
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        if (wide[i] > cut) places_of_row[at++] = static_cast<P>(lane * OWN + i);
      }
    } else {
      const uint32_t taken = taken_with_ties(wide, there, k, guessed && !nan, edge);
      at = sum_before(__popc(taken));
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        if (taken >> i & 1) places_of_row[at++] = static_cast<P>(lane * OWN + i);
      }
    }
    __syncwarp();
    for (int i = lane; i < k; i += 32) {
      const P place = places_of_row[i];
      places[row * k + i] = place;
      values[row * k + i] = x[row * num_feats + place];  // from L1
    }
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
  const int64_t blocks = ceil_div(num_rows, kWarps), most = static_cast<int64_t>(processors) * kBlocks;
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
