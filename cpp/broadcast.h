// Rows of features that broadcast, read by vectors.
#pragma once

#include <algorithm>

#include "rows.h"
#include "simd.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

// Where in an operand's row the features of a result are, in blocks of N. The last block ends with the last feature; of
// fewer than N features there is one, and the last stands in for those that lack.
template <int N>
class Places {
 public:
  Places(const Operand& x, int64_t num_feats)
      : count_(x.data ? (num_feats + N - 1) / N : 0), places_(count_ * N), kinds_(count_) {
    for (int64_t b = 0; b < count_; ++b) {
      int64_t* at = places_.get() + b * N;
      bool one = true, run = true;
      for (int i = 0; i < N; ++i) {
        at[i] = std::min(start(b, num_feats) + i, num_feats - 1) / x.div % x.len;
        one = one && at[i] == at[0];
        run = run && at[i] == at[0] + i;
      }
      kinds_[b] = one ? Kind::one : run ? Kind::run : Kind::any;
    }
  }

  static int64_t start(int64_t block, int64_t num_feats) {
    return std::max<int64_t>(0, std::min<int64_t>(block * N, num_feats - N));
  }

  // The features of a block, of the operand's row at `row`.
  template <class T>
  Vec<Acc<T>, N> read(const T* row, int64_t block) const {
    const int64_t* at = places_.get() + block * N;
    if (kinds_[block] == Kind::run) return load<N>(row + at[0]);
    if (kinds_[block] == Kind::one) return splat<N>(widen(row[at[0]]));
    Vec<Acc<T>, N> out;
    for (int i = 0; i < N; ++i) out[i] = widen(row[at[i]]);
    return out;
  }

 private:
  enum class Kind : char { one, run, any };

  int64_t count_;
  Buffer<int64_t> places_;
  Buffer<Kind> kinds_;
};

// Features of a result after which the places of an operand's stop being one, or side by side; 0: none.
inline int64_t unbroken(const Operand& x, int64_t num_feats) {
  return !x.data || x.len == 1 || x.len == num_feats ? 0 : x.div > 1 ? x.div : x.len;
}

// Calls f with a number of lanes, as an integral constant: the machine's, or fewer that divide `whole` (0: whatever),
// and no more than there are features, unless these are fewer than four.
template <class T, class F>
void with_lanes(int64_t whole, int64_t num_feats, F f) {
  const auto fits = [&](int lanes) { return whole % lanes == 0 && num_feats >= lanes; };
  if (fits(kLanes<T>)) return f(std::integral_constant<int, kLanes<T>>{});
  if constexpr (kLanes<T> > 8)
    if (fits(8)) return f(std::integral_constant<int, 8>{});
  f(std::integral_constant<int, std::min(kLanes<T>, 4)>{});
}

}  // namespace
}  // namespace gnnaccel::GNNACCEL_ISA
