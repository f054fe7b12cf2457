// Communities on the CPU: the steps of parallel Louvain that read every edge, node by node. Same bits as those of CUDA,
// in torch, beside which they are called (gnnaccel/graph/network.py); hence compiled without contraction of products
// into sums.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels.h"
#include "rows.h"

namespace gnnaccel {
namespace {

constexpr int64_t kTasksOfThread = 32;
constexpr int64_t kAhead = 16;  // edges between asking for a label and reading it

// Sums by community: a hash table with linear probing, at most half full, empty again after each use.
class Sums {
 public:
  // Before the first `add`: how many communities there may be.
  void reserve(int64_t most) {
    size_t size = 8;
    bits_ = 3;
    for (; size < 2 * static_cast<size_t>(most); size *= 2) ++bits_;
    mask_ = size - 1;
    if (slots_.size() < size) slots_.resize(size, Slot{kNone, 0});
    if (used_.size() < size / 2) used_.resize(size / 2);
  }

  // Whether it is the first of this community.
  bool add(int64_t community, int64_t weight) {
    size_t at = static_cast<uint64_t>(community) * 0x9E3779B97F4A7C15u >> (64 - bits_);
    while (slots_[at].community != community) {
      if (slots_[at].community == kNone) {
        slots_[at] = {community, weight};
        used_[num_used_++] = at;
        return true;
      }
      at = (at + 1) & mask_;
    }
    slots_[at].sum += weight;
    return false;
  }

  int64_t size() const { return num_used_; }

  // body(community, sum) for each, in any order; nothing is left.
  template <class Body>
  void drain(const Body& body) {
    for (int64_t i = 0; i < num_used_; ++i) {
      Slot& slot = slots_[used_[i]];
      body(slot.community, slot.sum);
      slot = {kNone, 0};
    }
    num_used_ = 0;
  }

 private:
  static constexpr int64_t kNone = -1;
  struct Slot {
    int64_t community;
    int64_t sum;
  };
  std::vector<Slot> slots_;
  std::vector<size_t> used_;
  int64_t num_used_ = 0;
  size_t mask_ = 0;
  int bits_ = 0;
};

template <class I>
int64_t skew(const Csr& graph, const int64_t* hashes, int threads) {
  const CsrOf<I> g(graph);
  std::atomic<uint64_t> total{0};
  for_row_ranges(g, useful_threads(g.nnz * 4, threads), [&](int64_t first, int64_t last) {
    uint64_t found = 0;
    for (int64_t r = first; r < last; ++r) {
      uint64_t a = 0, b = 0;
      for (int64_t k = g.indptr[r]; k < g.indptr[r + 1]; ++k) {
        if (k + kAhead < g.nnz) __builtin_prefetch(hashes + 2 * static_cast<int64_t>(g.indices[k + kAhead]));
        const int64_t* of = hashes + 2 * static_cast<int64_t>(g.indices[k]);
        a += static_cast<uint64_t>(of[0]);
        b += static_cast<uint64_t>(of[1]);
      }
      found += static_cast<uint64_t>(hashes[2 * r]) * b - static_cast<uint64_t>(hashes[2 * r + 1]) * a;
    }
    total += found;
  });
  return static_cast<int64_t>(total.load());
}

template <class I, class P>
void count_neighbours(const Csr& graph, int64_t first_row, int64_t first_col, const P* place, int64_t* degree,
                      int threads) {
  const CsrOf<I> g(graph);
  for_row_ranges(g, useful_threads(g.nnz, threads), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      degree[place[first_row + r]] +=
          g.indptr[r + 1] - g.indptr[r] -
          std::count(g.indices + g.indptr[r], g.indices + g.indptr[r + 1], static_cast<I>(first_row + r - first_col));
  });
}

template <class I, class P>
void place_neighbours(const Csr& graph, int64_t first_row, int64_t first_col, const P* place, int64_t* next, P* cols,
                      int threads) {
  const CsrOf<I> g(graph);
  const P* column = place + first_col;
  for_row_ranges(g, useful_threads(g.nnz * 4, threads), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      int64_t& at = next[place[first_row + r]];
      for (int64_t k = g.indptr[r]; k < g.indptr[r + 1]; ++k) {
        if (k + kAhead < g.nnz) __builtin_prefetch(column + g.indices[k + kAhead]);
        if (g.indices[k] != first_row + r - first_col) cols[at++] = column[g.indices[k]];
      }
    }
  });
}

template <class I, class W>
struct NetworkOf {
  const int64_t* indptr;
  const I* cols;
  const W* weights;
  int64_t num_nodes;

  explicit NetworkOf(const Network& g)
      : indptr(g.indptr),
        cols(static_cast<const I*>(g.cols)),
        weights(static_cast<const W*>(g.weights)),
        num_nodes(g.num_nodes) {}

  // add(community, weight) for edges [begin, end), by their neighbours' labels; those up to `limit` are asked for
  // ahead.
  template <class Add>
  void for_edges(int64_t begin, int64_t end, int64_t limit, const I* label, const Add& add) const {
    for (int64_t e = begin; e < end; ++e) {
      if (e + kAhead < limit) __builtin_prefetch(label + cols[e + kAhead]);
      add(label[cols[e]], weights ? weights[e] : 1);
    }
  }
};

// body(first, last) over ranges of [first, last) with about equally many edges, offsets[i] those before i.
template <class Body>
void for_ranges(const int64_t* offsets, int64_t first, int64_t last, int threads, const Body& body) {
  const int64_t before = offsets[first], edges = offsets[last] - before;
  threads = useful_threads(edges * 8, threads);
  const int64_t tasks = threads <= 1 ? 1 : threads * kTasksOfThread;
  auto start = [&](int64_t t) {
    if (t == 0 || t == tasks) return t ? last : first;
    return static_cast<int64_t>(std::lower_bound(offsets + first, offsets + last, before + edges * t / tasks) -
                                offsets);
  };
  parallel_for(tasks, threads, [&](int64_t t) {
    if (start(t) < start(t + 1)) body(start(t), start(t + 1));
  });
}

// Compares as (value rounded to f32, label).
int64_t packed(double value, int64_t label) {
  const auto rounded = static_cast<float>(value);
  int32_t bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  if (bits < 0) bits ^= 0x7FFFFFFF;
  return bits * (int64_t{1} << 32) | label;
}

template <class I, class W>
void moves(const Network& network, I* label, int64_t* volume, int64_t first, int64_t last, double scale, Moves allowed,
           int threads) {
  const NetworkOf<I, W> g(network);
  std::vector<I> chosen(static_cast<size_t>(last - first));
  for_ranges(g.indptr, first, last, threads, [&](int64_t begin, int64_t end) {
    Sums sums;
    for (int64_t v = begin; v < end; ++v) {
      const int64_t own = label[v], strength = network.strength[v];
      const auto k = static_cast<double>(strength);
      int64_t best = packed(-scale * (k * static_cast<double>(volume[own] - strength)), own);
      sums.reserve(std::min(g.indptr[v + 1] - g.indptr[v], g.num_nodes));
      g.for_edges(g.indptr[v], g.indptr[v + 1], g.indptr[g.num_nodes], label, [&](int64_t community, int64_t weight) {
        if (sums.add(community, weight)) __builtin_prefetch(volume + community);
      });
      sums.drain([&](int64_t community, int64_t sum) {
        const bool stays = community == own;
        const auto others = static_cast<double>(volume[community] - (stays ? strength : 0));
        double value = static_cast<double>(sum) - scale * (k * others);
        value += stays ? 1e-6 * std::abs(value) + 1e-9 : 0.0;
        best = std::max(best, packed(value, community));
      });
      best &= 0xFFFFFFFF;
      if (allowed == Moves::down) best = std::min(best, own);
      if (allowed == Moves::up) best = std::max(best, own);
      chosen[v - first] = static_cast<I>(best);
    }
  });
  for (int64_t v = first; v < last; ++v) {
    volume[label[v]] -= network.strength[v];
    volume[chosen[v - first]] += network.strength[v];
    label[v] = chosen[v - first];
  }
}

// finish(community, its sums by other communities) for each community, on any thread.
template <class I, class W, class Finish>
void sum_members(const Network& network, const Members& members, int threads, const Finish& finish) {
  const NetworkOf<I, W> g(network);
  const auto* label = static_cast<const I*>(members.label);
  for_ranges(members.edges, 0, members.count, threads, [&](int64_t begin, int64_t end) {
    Sums sums;
    for (int64_t c = begin; c < end; ++c) {
      sums.reserve(std::min(members.edges[c + 1] - members.edges[c], members.count));
      for (int64_t i = members.bounds[c]; i < members.bounds[c + 1]; ++i) {
        const int64_t v = members.nodes[i];
        const int64_t left = members.bounds[c + 1] - i;  // members lie anywhere: their edges are asked for ahead
        if (left > 8) __builtin_prefetch(g.indptr + members.nodes[i + 8]);
        if (left > 4) prefetch<256>(g.cols + g.indptr[members.nodes[i + 4]]);
        g.for_edges(g.indptr[v], g.indptr[v + 1], g.indptr[v + 1], label, [&](int64_t community, int64_t weight) {
          if (community != c) sums.add(community, weight);
        });
      }
      finish(c, sums);
    }
  });
}

template <class I, class W>
void degrees(const Network& network, const Members& members, int64_t* degree, int threads) {
  sum_members<I, W>(network, members, threads, [&](int64_t c, Sums& sums) {
    degree[c] = sums.size();
    sums.drain([](int64_t, int64_t) {});
  });
}

template <class I, class W>
void edges(const Network& network, const Members& members, const int64_t* indptr, I* cols, W* weights, int threads) {
  sum_members<I, W>(network, members, threads, [&](int64_t c, Sums& sums) {
    std::vector<std::pair<int64_t, int64_t>> found;
    found.reserve(static_cast<size_t>(sums.size()));
    sums.drain([&](int64_t community, int64_t sum) { found.emplace_back(community, sum); });
    std::sort(found.begin(), found.end());
    for (size_t i = 0; i < found.size(); ++i) {
      cols[indptr[c] + static_cast<int64_t>(i)] = static_cast<I>(found[i].first);
      weights[indptr[c] + static_cast<int64_t>(i)] = static_cast<W>(found[i].second);
    }
  });
}

// body(first, second): zeros of these types.
template <class Body>
void with_types(IndexType first, IndexType second, const Body& body) {
  const bool wide = second == IndexType::i64;
  if (first == IndexType::i64)
    wide ? body(int64_t{}, int64_t{}) : body(int64_t{}, int32_t{});
  else
    wide ? body(int32_t{}, int64_t{}) : body(int32_t{}, int32_t{});
}

}  // namespace

int64_t edge_skew(const Csr& graph, const int64_t* hashes, int threads) {
  return graph.index_type == IndexType::i64 ? skew<int64_t>(graph, hashes, threads)
                                            : skew<int32_t>(graph, hashes, threads);
}

void network_degrees(const Csr& graph, int64_t first_row, int64_t first_col, const void* place, int64_t* degree,
                     IndexType type, int threads) {
  with_types(graph.index_type, type, [&](auto index, auto node) {
    count_neighbours<decltype(index)>(graph, first_row, first_col, static_cast<const decltype(node)*>(place), degree,
                                      threads);
  });
}

void network_edges(const Csr& graph, int64_t first_row, int64_t first_col, const void* place, int64_t* next, void* cols,
                   IndexType type, int threads) {
  with_types(graph.index_type, type, [&](auto index, auto node) {
    using P = decltype(node);
    place_neighbours<decltype(index)>(graph, first_row, first_col, static_cast<const P*>(place), next,
                                      static_cast<P*>(cols), threads);
  });
}

void community_moves(const Network& network, void* label, int64_t* volume, int64_t first, int64_t last, double scale,
                     Moves allowed, int threads) {
  with_types(network.col_type, network.weight_type, [&](auto index, auto weight) {
    using I = decltype(index);
    moves<I, decltype(weight)>(network, static_cast<I*>(label), volume, first, last, scale, allowed, threads);
  });
}

void community_degrees(const Network& network, const Members& members, int64_t* degree, int threads) {
  with_types(network.col_type, network.weight_type, [&](auto index, auto weight) {
    degrees<decltype(index), decltype(weight)>(network, members, degree, threads);
  });
}

void community_edges(const Network& network, const Members& members, const int64_t* indptr, void* cols, void* weights,
                     int threads) {
  with_types(network.col_type, network.weight_type, [&](auto index, auto weight) {
    using I = decltype(index);
    using W = decltype(weight);
    edges<I, W>(network, members, indptr, static_cast<I*>(cols), static_cast<W*>(weights), threads);
  });
}

}  // namespace gnnaccel
