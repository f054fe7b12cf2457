// Drawing edges from one row: with and without replacement, uniformly and by weight.
#pragma once

#include <algorithm>
#include <utility>

#include "sampling.h"

namespace gnnaccel {
namespace {

constexpr int64_t kScanned = 64;  // that many picks are searched one by one, more by hashing

double weight_of(const Relation& relation, int64_t k) {
  return relation.weight_type == DType::f64 ? static_cast<const double*>(relation.weight)[k]
                                            : static_cast<const float*>(relation.weight)[k];
}

double checked_weight(const Relation& relation, int64_t k) {
  const double weight = weight_of(relation, k);
  if (!(weight >= 0 && std::isfinite(weight)))
    refuse("neighbor_sample: edge_weight: expected finite numbers that are not negative, got " +
           std::to_string(weight) + " at place " + std::to_string(k));
  return weight;
}

// The edges of one row that may be drawn, and how many will be.
template <class I>
struct Row {
  I first;
  I size;
  I count;
};

// Draws from rows; has the scratch memory of one thread.
template <class I>
class Picker {
 public:
  Picker(const Relation& relation, const Draw& draw, uint64_t stream)
      : relation_(relation), draw_(draw), seed_(splitmix64(draw.seed, stream)) {}

  // Places in indices of `row`, the row of the destination with that place.
  void pick(const Row<I>& row, bool all, int64_t place, I* out) {
    if (all) {
      for (I k = 0; k < row.size; ++k) out[k] = row.first + k;
      return;
    }
    Random random(seed_, static_cast<uint64_t>(place));
    if (relation_.weight)
      draw_.replace ? weighted_again(row, random, out) : weighted(row, random, out);
    else if (draw_.replace)
      for (I k = 0; k < row.count; ++k) out[k] = row.first + static_cast<I>(random.below(row.size));
    else if (row.count <= kScanned)
      scanned(row, random, out);
    else
      hashed(row, random, out);
  }

 private:
  // Floyd's algorithm: `taken` tells whether a number is among those drawn before, and takes it.
  template <class Taken>
  void floyd(const Row<I>& row, Random& random, I* out, Taken taken) {
    for (I top = row.size - row.count; top < row.size; ++top) {
      I drawn = static_cast<I>(random.below(static_cast<int64_t>(top) + 1));
      if (!taken(drawn, out)) {
        *out++ = row.first + drawn;
      } else {
        taken(top, out);
        *out++ = row.first + top;
      }
    }
  }

  void scanned(const Row<I>& row, Random& random, I* out) {
    uint64_t seen = 0;  // last six bits of the numbers drawn: most are new by this alone
    const I* first = out;
    floyd(row, random, out, [&](I drawn, const I* end) {
      const uint64_t bit = uint64_t{1} << (drawn & 63);
      const bool maybe = seen & bit;
      seen |= bit;
      return maybe && (row.size <= 64 || std::find(first, end, row.first + drawn) != end);
    });
  }

  void hashed(const Row<I>& row, Random& random, I* out) {
    size_t size = 256;
    while (size < 2 * static_cast<size_t>(row.count)) size *= 2;
    drawn_.assign(size, -1);
    floyd(row, random, out, [&](I drawn, const I*) {
      size_t at = splitmix64(0, static_cast<uint64_t>(drawn)) & (size - 1);
      while (drawn_[at] >= 0 && drawn_[at] != drawn) at = (at + 1) & (size - 1);
      const bool there = drawn_[at] == drawn;
      drawn_[at] = drawn;
      return there;
    });
  }

  // Exponential keys (Efraimidis and Spirakis, 2006): the edges with the smallest of -log(uniform) / weight.
  void weighted(const Row<I>& row, Random& random, I* out) {
    keys_.clear();
    for (I k = row.first; k < row.first + row.size; ++k) {
      const double weight = checked_weight(relation_, k);
      if (weight == 0) continue;
      const bool full = static_cast<I>(keys_.size()) == row.count;
      const double uniform = random.unit();
      if (full && 1 - uniform >= weight * keys_.front().first) continue;  // -log(u) >= 1 - u: no logarithm needed
      const double key = -std::log(uniform) / weight;
      if (full) {
        if (key >= keys_.front().first) continue;
        std::pop_heap(keys_.begin(), keys_.end());
        keys_.pop_back();
      }
      keys_.emplace_back(key, k);
      std::push_heap(keys_.begin(), keys_.end());
    }
    if (static_cast<I>(keys_.size()) != row.count) refuse("neighbor_sample: edge_weight: changed while it was read");
    std::sort(keys_.begin(), keys_.end());
    for (const auto& key : keys_) *out++ = key.second;
  }

  void weighted_again(const Row<I>& row, Random& random, I* out) {
    sums_.resize(static_cast<size_t>(row.size));
    double sum = 0;
    for (I k = 0; k < row.size; ++k) sums_[static_cast<size_t>(k)] = sum += checked_weight(relation_, row.first + k);
    if (!std::isfinite(sum)) refuse("neighbor_sample: edge_weight: the weights of a row add up to more than a double");
    for (I k = 0; k < row.count; ++k) {
      const auto found = std::lower_bound(sums_.begin(), sums_.end(), random.unit() * sum);
      if (found == sums_.end()) refuse("neighbor_sample: edge_weight: changed while it was read");
      out[k] = row.first + static_cast<I>(found - sums_.begin());
    }
  }

  const Relation& relation_;
  const Draw& draw_;
  const uint64_t seed_;
  std::vector<I> drawn_;
  std::vector<std::pair<double, I>> keys_;
  std::vector<double> sums_;
};

}  // namespace
}  // namespace gnnaccel
