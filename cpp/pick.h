// Drawing edges from one row: with and without replacement, uniformly and by weight.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "sampling.h"

namespace gnnaccel {
namespace {

constexpr int64_t kScanned = 64;  // that many picks are searched one by one, more by hashing

template <class W>
double checked_weight(const W* weights, int64_t k) {
  const double weight = weights[k];
  if (!(weight >= 0 && weight <= std::numeric_limits<double>::max()))
    refuse("neighbor_sample: edge_weight: expected finite numbers that are not negative, got " +
           std::to_string(weight) + " at place " + std::to_string(k));
  return weight;
}

// body(weights), a pointer to floats or doubles.
template <class Body>
auto with_weights(const Relation& relation, const Body& body) {
  if (relation.weight_type == DType::f64) return body(static_cast<const double*>(relation.weight));
  return body(static_cast<const float*>(relation.weight));
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
  Picker(const Relation& relation, const Draw& draw, uint64_t seed, uint64_t stream)
      : relation_(relation), draw_(draw), seed_(splitmix64(seed, stream)) {}

  // Places in indices of `row`, the row of the destination with that place.
  void pick(const Row<I>& row, bool all, int64_t place, I* out) {
    if (all) {
      for (I k = 0; k < row.size; ++k) out[k] = row.first + k;
      return;
    }
    Random random(seed_, static_cast<uint64_t>(place));
    if (relation_.weight)
      with_weights(relation_, [&](const auto* weights) {
        draw_.replace ? weighted_again(weights, row, random, out) : weighted(weights, row, random, out);
      });
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

  // Drawn one after the other, a draw that repeats one before not counting: the same as drawing from what is left, each
  // time. Where the repeats become many, or the draws are, what is still missing is found by keys.
  template <class W>
  void weighted(const W* weights, const Row<I>& row, Random& random, I* out) {
    I found = 0;
    if (row.count <= kScanned) {
      add_up(weights, row);
      for (I attempts = 4 * row.count + 8; found < row.count && attempts > 0; --attempts) {
        const I drawn = one_of_sums(row, random);
        if (std::find(out, out + found, drawn) == out + found) out[found++] = drawn;
      }
    }
    if (found < row.count) by_keys(weights, row, random, out, found);
  }

  template <class W>
  void weighted_again(const W* weights, const Row<I>& row, Random& random, I* out) {
    add_up(weights, row);
    for (I k = 0; k < row.count; ++k) out[k] = one_of_sums(row, random);
  }

  template <class W>
  void add_up(const W* weights, const Row<I>& row) {
    sums_.resize(static_cast<size_t>(row.size));
    double sum = 0;
    for (I k = 0; k < row.size; ++k) sums_[static_cast<size_t>(k)] = sum += checked_weight(weights, row.first + k);
    if (!std::isfinite(sum)) refuse("neighbor_sample: edge_weight: the weights of a row add up to more than a double");
  }

  I one_of_sums(const Row<I>& row, Random& random) const {
    const auto found = std::lower_bound(sums_.begin(), sums_.end(), random.unit() * sums_.back());
    return row.first + static_cast<I>(found - sums_.begin());
  }

  // Of the edges that are not among the first `found` of out, those with the smallest keys, exponential ones whose
  // rates are the weights: Efraimidis and Spirakis, 2006, with their jumps. Once there are enough, the sum of weights
  // up to the next edge with a key below the largest is exponential too, so that few edges need random numbers.
  template <class W>
  void by_keys(const W* weights, const Row<I>& row, Random& random, I* out, I found) {
    drawn_.assign(out, out + found);
    std::sort(drawn_.begin(), drawn_.end());
    auto taken = drawn_.begin();
    keys_.clear();
    double jump = 0;
    const auto next_jump = [&] { jump = -std::log(random.unit()) / keys_.front().first; };
    for (I k = row.first; k < row.first + row.size; ++k) {
      const double weight = checked_weight(weights, k);
      if (taken != drawn_.end() && *taken == k) {
        ++taken;
      } else if (static_cast<I>(keys_.size()) < row.count - found) {
        if (weight == 0) continue;
        keys_.emplace_back(-std::log(random.unit()) / weight, k);
        std::push_heap(keys_.begin(), keys_.end());
        if (static_cast<I>(keys_.size()) == row.count - found) next_jump();
      } else if ((jump -= weight) < 0) {
        const double below = std::expm1(-weight * keys_.front().first);  // less the chance of a key below the largest
        std::pop_heap(keys_.begin(), keys_.end());
        keys_.back() = {-std::log1p(random.unit() * below) / weight, k};
        std::push_heap(keys_.begin(), keys_.end());
        next_jump();
      }
    }
    if (static_cast<I>(keys_.size()) != row.count - found)
      refuse("neighbor_sample: edge_weight: changed while it was read");
    std::sort(keys_.begin(), keys_.end());
    for (const auto& key : keys_) out[found++] = key.second;
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
