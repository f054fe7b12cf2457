// The k largest of the values that a warp has in registers.
//
// A warp takes a row into registers and looks for a value that k of them exceed: first where the row before was cut
// (its first row: where a normal distribution would be), then where as many would be added or lost as are missing, at
// the spacing of values that rows before had; then between the closest two. Once a single one is wrong, the next larger
// one is dropped, or the next smaller one added. Three counts and two thirds of such a step a row where rows are alike.
// Prefix sums give each lane its positions. That each lane kept as many as it counted proves the cut; where it did not,
// some are equal to the last one, which are kept in part, the first ones, or NaN; if that does not settle it, integers
// in the order of the values do, bit by bit. Instructions bound it (H200, 256 features: 269 a row; registers for
// 48 warps).
#pragma once

#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

constexpr int kBold = 3;      // guesses by the spacing of the rows before
constexpr int kGuesses = 12;  // between those, before integers
constexpr int kFar = 12;      // so many too many or too few after the bold ones: the row's own moments are asked
constexpr int kClose = 1;     // so many too many or too few are dropped or added

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
__device__ __forceinline__ uint32_t min_of_warp(uint32_t x) {
#if defined(__CUDA_ARCH__)
  return __reduce_min_sync(~0u, x);
#else
  return ~max_of_warp(~x);
#endif
}

// Sum of x over the lanes up to this one.
__device__ __forceinline__ int sum_up_to(int x) {
#if defined(__CUDA_ARCH__)
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {  // shfl.up says itself which lanes have nothing to add
    asm volatile("{ .reg .pred p; .reg .s32 other; shfl.sync.up.b32 other|p, %0, %1, 0, -1; @p add.s32 %0, %0, other; }"
                 : "+r"(x)
                 : "r"(step));
  }
#else
  const int lane = threadIdx.x % 32;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += other;
  }
#endif
  return x;
}

// Where a warp cut the last row, and the spacing of values around there; no spacing: not known.
struct Guess {
  float at = 0, spacing = 0;
};

// How many of a lane's values exceed a cut. A difference times 2^80 is more than 1, or saturates as well, unless it is
// tiny: such a value may count as none or less, never as more. Two operations a value, which run at twice the rate of a
// comparison and of what counts predicates: half the time.
template <int OWN>
__device__ __forceinline__ int count_above(const float (&x)[OWN], float cut) {
  constexpr float kSteep = 0x1p80f, kBias = 0x1p23f;  // what is added to the latter lies in the low bits
  const float steep_cut = -kSteep * cut;
  float above = kBias;
#pragma unroll
  for (int i = 0; i < OWN; ++i) above += __saturatef(fmaf(x[i], kSteep, steep_cut));
  return static_cast<int>(__float_as_uint(above) - __float_as_uint(kBias));
}

// Where a normal distribution of the mean and variance of a warp's values has its k largest, roughly (a logistic one).
template <int OWN>
__device__ __forceinline__ Guess guess_from_moments(const float (&x)[OWN], int num_feats, int k) {
  float sum = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const float finite = x[i] - x[i] == 0 ? x[i] : 0;
    sum += finite;
    squares += finite * finite;
  }
#pragma unroll
  for (int step = 16; step; step /= 2) {
    sum += __shfl_xor_sync(~0u, sum, step);
    squares += __shfl_xor_sync(~0u, squares, step);
  }
  const float mean = sum / num_feats, below = num_feats - k + 0.5f, above = k + 0.5f;
  const float scale = sqrtf(fmaxf(squares / num_feats - mean * mean, 0)) / 1.7f;
  if (!(scale > 1e-30f && scale < 1e30f)) return {0, 1};
  return {mean + scale * logf(below / above), scale * (above + below) / (above * below)};
}

// The float halfway between two others in the order of their bits.
__device__ __forceinline__ float halfway(float low, float high) {
  auto ordered = [](int bits) { return bits < 0 ? bits ^ 0x7FFFFFFF : bits; };  // negative values in ascending order
  const int a = ordered(static_cast<int>(__float_as_uint(low))), b = ordered(static_cast<int>(__float_as_uint(high)));
  return __uint_as_float(static_cast<uint32_t>(ordered((a & b) + ((a ^ b) >> 1))));
}

// A value that about k of the warp's values x exceed, by guesses; `wrong`: how many more than k do; false if none was
// found. `above`: how many of the lane's own do.
template <int OWN>
__device__ __forceinline__ bool guess_cut(const float (&x)[OWN], int num_feats, int k, Guess& guess, float& cut,
                                          int& above, int& wrong) {
  auto count = [&] {
    above = count_above(x, cut);
    wrong = sum_of_warp(above) - k;
    return static_cast<unsigned>(wrong + kClose) <= 2 * kClose;
  };
  if (guess.spacing == 0) guess = guess_from_moments(x, num_feats, k);
  cut = guess.at;
  if (count()) return true;
  float first = cut;
  int first_wrong = wrong;
#pragma unroll
  for (int i = 0; i < kBold; ++i) {
    cut += wrong * guess.spacing;
    if (count()) break;
  }
  // Too short a way or too long: half of the time each where the spacing is right.
  guess.spacing *= (wrong ^ first_wrong) >= 0 ? 1.02f : 0.98f;
  if (static_cast<unsigned>(wrong + kClose) <= 2 * kClose) return true;
  if (wrong > kFar || wrong < -kFar) {  // of another scale than the row before
    guess = guess_from_moments(x, num_feats, k);
    first = cut = guess.at;
    if (count()) return true;
    first_wrong = wrong;
#pragma unroll 1
    for (int i = 1; i < kBold; ++i) {
      cut += wrong * guess.spacing;
      if (count()) return true;
    }
  }
  float low = -INFINITY, high = INFINITY;  // too many exceed low, too few high
  int low_wrong = 0, high_wrong = 0;
  auto bound = [&](float at, int wrong) {
    (wrong > 0 ? low : high) = at;
    (wrong > 0 ? low_wrong : high_wrong) = wrong;
  };
  bound(first, first_wrong);
  for (int i = 0; i < kGuesses; ++i) {
    bound(cut, wrong);
    if (low_wrong == 0 || high_wrong == 0) {
      guess.spacing *= 2;
      cut += wrong * guess.spacing;
    } else if (i < kBold || i % 2) {
      guess.spacing = __fdividef(high - low, static_cast<float>(low_wrong - high_wrong));
      cut = low + low_wrong * guess.spacing;
    } else {
      cut = halfway(low, high);
    }
    if (count()) return true;
  }
  cut = high;  // many are equal: to the largest below it
  wrong = -1;
  return false;
}

// Moves a cut that one too many or too few exceed: drops the smallest above it or adds the largest below, which is
// `edge`.
template <int OWN>
__device__ __forceinline__ void move_cut(const float (&x)[OWN], int wrong, float& cut, float& edge, int& above) {
  // Values as numbers that wrap around at the cut, those of its sign next to it on both sides. Turned over if it is
  // negative.
  const uint32_t sign = __float_as_uint(cut) & 0x80000000u, origin = (__float_as_uint(cut) ^ sign) + (sign == 0);
  const bool up = wrong > 0, least = up == (sign == 0);
  uint32_t own = least ? ~0u : 0, all;
  if (least) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) own = __viaddmin_u32(__float_as_uint(x[i]), sign - origin, own);
    all = min_of_warp(own);
  } else {
#pragma unroll
    for (int i = 0; i < OWN; ++i) own = __viaddmax_u32(__float_as_uint(x[i]), sign - origin, own);
    all = max_of_warp(own);
  }
  edge = __uint_as_float((all + origin) ^ sign);
  cut = up ? edge : __uint_as_float((all + origin + (sign ? 1 : -1)) ^ sign);
  if (own == all) above -= wrong;
}

// A lane's features of a row. FULL: there are OWN of them, aligned; else what is not there is -infinity.
template <typename T, int OWN, bool FULL>
__device__ __forceinline__ void load_own(const T* own, int there, float (&x)[OWN]) {
  if constexpr (FULL) {
    constexpr int V = OWN * sizeof(T) <= 16 ? OWN : 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < OWN; i += V) {
      Pack<T, V> pack;
      load(own + i, pack);
#pragma unroll
      for (int j = 0; j < V; ++j) x[i + j] = widen(pack.values[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] = i < there ? widen(load_one(own + i)) : -INFINITY;
  }
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
  const int own = __popc(equal);
  needed -= sum_up_to(own) - own;
  for (; needed > 0 && equal; --needed, equal &= equal - 1) taken |= equal & (~equal + 1);
  return taken;
}

// Which of a lane's values are kept where some are equal to `edge` or NaN, if that settles it; else by integers. Out of
// line, as it is rare and would take registers from what is not.
template <typename T, int OWN, bool FULL>
__device__ __noinline__ uint32_t taken_with_ties(const T* own, int there, int k, float edge) {
  float x[OWN];
  load_own<T, OWN, FULL>(own, there, x);
  uint32_t taken = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    taken |= static_cast<uint32_t>(!(x[i] <= edge)) << i;
    equal |= static_cast<uint32_t>(x[i] == edge && i < there) << i;
  }
  const int needed = k - sum_of_warp(__popc(taken));
  if (needed >= 0 && needed <= sum_of_warp(__popc(equal))) return taken | first_of(equal, needed);
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

}  // namespace
}  // namespace cuda
}  // namespace gnnaccel
