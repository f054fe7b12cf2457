// The k largest of every row, exactly. A row's values become integer keys of the same order; the k-th largest key is
// sought by counting how many keys reach a guess, a loop over vectors that moves an end of the interval to a key that
// is there, so that it ends after few guesses even among ties. The previous row's result is the first guess.
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "isa.h"
#include "rows.h"
#include "simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace gnnaccel::GNNACCEL_ISA {
namespace {

constexpr int64_t kWord = 64;        // keys to a word of the mask; rows of keys are padded to a multiple of it
constexpr int64_t kElements = 8192;  // of x to a task

template <class T>
using KeyOf = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
template <class Key>
constexpr Key kLeast = std::numeric_limits<Key>::min();  // below the key of every value
template <class Key>
constexpr Key kMost = std::numeric_limits<Key>::max();  // that of NaN

template <class A>
inline KeyOf<A> key_of(A x) {
  using Key = KeyOf<A>;
  Key bits;
  std::memcpy(&bits, &x, sizeof(x));
  bits = bits == kLeast<Key> ? 0 : bits;  // -0
  bits ^= (bits >> (8 * sizeof(Key) - 1)) & kMost<Key>;
  return x != x ? kMost<Key> : bits;
}

// What of a row's keys reaches a guess, and the keys next to it on both sides.
template <class Key>
struct Split {
  Key count;  // of keys >= guess
  Key above;  // the least of these
  Key below;  // the largest of the others
};

template <class Key>
inline Split<Key> split(const Key* keys, int64_t padded, Key guess) {
  constexpr int N = kVectorBytes / static_cast<int>(sizeof(Key));
  using V = Vec<Key, N>;
  V count{}, above = V{} + kMost<Key>, below = V{} + kLeast<Key>;
  for (int64_t i = 0; i < padded; i += N) {
    V key;
    std::memcpy(&key, keys + i, sizeof(key));
    const V in = key >= guess;
    const V if_in = in ? key : V{} + kMost<Key>, if_out = in ? V{} + kLeast<Key> : key;
    count -= in;
    above = if_in < above ? if_in : above;
    below = if_out > below ? if_out : below;
  }
  Split<Key> all{0, kMost<Key>, kLeast<Key>};
  for (int i = 0; i < N; ++i) {
    all.count += count[i];
    all.above = std::min<Key>(all.above, above[i]);
    all.below = std::max<Key>(all.below, below[i]);
  }
  return all;
}

// Keys above `bound` are kept, and the first `equal` of those that equal it.
template <class Key>
struct Bound {
  Key bound;
  int64_t equal;
};

// The next guess, in (low, high]: between them as k is between their ranks, or in the middle.
template <class Key>
inline Key guess_between(Key low, Key high, double part) {
  using U = std::make_unsigned_t<Key>;
  const U range = static_cast<U>(high) - static_cast<U>(low);
  const U step = static_cast<U>(static_cast<double>(range) * part);
  return static_cast<Key>(static_cast<U>(low) + std::min<U>(std::max<U>(step, 1), range));
}

template <class Key>
Bound<Key> kth_largest(const Key* keys, int64_t count, int64_t padded, int64_t k, Key guess) {
  Key low = kMost<Key>, high = kLeast<Key>;
  for (int64_t i = 0; i < count; ++i) {
    low = std::min(low, keys[i]);
    high = std::max(high, keys[i]);
  }
  int64_t from_low = count, above_high = 0;  // keys >= low, at least k; keys > high, fewer than k
  if (guess <= low || guess > high) guess = guess_between(low, high, 0.5);
  for (int round = 0; low < high && from_low > k; ++round) {
    const Split<Key> at = split(keys, padded, guess);
    if (at.count >= k) {
      low = at.above;
      from_low = at.count;
    } else {
      high = at.below;
      above_high = at.count;
    }
    if (above_high == k - 1) low = high;  // it is the k-th
    const double rank = (static_cast<double>(from_low - k) + 0.5) / static_cast<double>(from_low - above_high);
    guess = guess_between(low, high, round % 2 ? 0.5 : rank);
  }
  if (low < high) return {static_cast<Key>(low - 1), 0};
  return {high, k - above_high};
}

// Bit i: keys[i] is above the bound; of kWord keys.
template <class Key>
inline uint64_t above_mask(const Key* keys, Key bound) {
  uint64_t mask = 0;
#if defined(__AVX512F__)
  constexpr int kStep = 64 / static_cast<int>(sizeof(Key));
  const __m512i limit = sizeof(Key) == 8 ? _mm512_set1_epi64(bound) : _mm512_set1_epi32(static_cast<int>(bound));
#pragma GCC unroll 8
  for (int i = 0; i < kWord; i += kStep) {
    const __m512i some = _mm512_loadu_si512(keys + i);
    const uint64_t bits = sizeof(Key) == 8 ? static_cast<uint64_t>(_mm512_cmpgt_epi64_mask(some, limit))
                                           : static_cast<uint64_t>(_mm512_cmpgt_epi32_mask(some, limit));
    mask |= bits << i;
  }
#elif defined(__AVX2__)
  constexpr int kStep = 32 / static_cast<int>(sizeof(Key));
  const __m256i limit = sizeof(Key) == 8 ? _mm256_set1_epi64x(bound) : _mm256_set1_epi32(static_cast<int>(bound));
#pragma GCC unroll 16
  for (int i = 0; i < kWord; i += kStep) {
    const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i));
    const int bits = sizeof(Key) == 8 ? _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpgt_epi64(some, limit)))
                                      : _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(some, limit)));
    mask |= static_cast<uint64_t>(static_cast<uint32_t>(bits)) << i;
  }
#else
  for (int i = 0; i < kWord; ++i) mask |= static_cast<uint64_t>(keys[i] > bound) << i;
#endif
  return mask;
}

// Values and places of what is kept, in ascending order.
template <class T, class Place, class Key>
void write_kept(const T* x, const Key* keys, int64_t padded, Bound<Key> kept, T* values, Place* places) {
  int64_t n = 0;
  for (int64_t base = 0; base < padded; base += kWord) {
    uint64_t mask = above_mask(keys + base, kept.bound);
    if (kept.equal > 0) {
      uint64_t ties = above_mask(keys + base, static_cast<Key>(kept.bound - 1)) & ~mask;
      for (; ties && kept.equal > 0; --kept.equal, ties &= ties - 1) mask |= ties & -ties;
    }
    for (; mask; ++n, mask &= mask - 1) {
      const int64_t d = base + __builtin_ctzll(mask);
      values[n] = x[d];
      places[n] = static_cast<Place>(d);
    }
  }
}

template <class T, class Place>
void run(const MaxkArgs& a) {
  using Key = KeyOf<Acc<T>>;
  const int64_t feats = a.kept.num_feats, k = a.kept.k, padded = (feats + kWord - 1) / kWord * kWord;
  const int64_t chunk = std::max<int64_t>(1, kElements / feats), chunks = (a.num_rows + chunk - 1) / chunk;
  auto* values = static_cast<T*>(const_cast<void*>(a.kept.values));
  auto* places = static_cast<Place*>(const_cast<void*>(a.kept.places));
  parallel_for(chunks, useful_threads(a.num_rows * feats, a.threads), [&](int64_t c) {
    const Buffer<Key> keys(padded);
    std::fill(keys.get() + feats, keys.get() + padded, kLeast<Key>);
    Key guess = kLeast<Key>;
    for (int64_t row = c * chunk; row < std::min(a.num_rows, (c + 1) * chunk); ++row) {
      const T* x = static_cast<const T*>(a.x) + row * feats;
      for (int64_t d = 0; d < feats; ++d) keys[d] = key_of(widen(x[d]));
      const Bound<Key> kept = kth_largest(keys.get(), feats, padded, k, guess);
      write_kept(x, keys.get(), padded, kept, values + row * k, places + row * k);
      guess = kept.bound;
    }
  });
}

template <class T>
void pick(const MaxkArgs& a) {
  a.kept.num_feats <= 256 ? run<T, uint8_t>(a) : run<T, uint16_t>(a);
}

}  // namespace

void maxk(const MaxkArgs& a) {
  switch (a.dtype) {
    case DType::f64:
      return pick<double>(a);
    case DType::bf16:
      return pick<bf16>(a);
    default:
      return pick<float>(a);
  }
}

}  // namespace gnnaccel::GNNACCEL_ISA
