// Cutting a network into parts on the CPU: moves of single nodes, one after the other, each knowing all before it
// (gnnaccel/parts/assign.py). No random numbers and no threads: a network always gives the same parts.
#include <algorithm>
#include <queue>
#include <vector>

#include "kernels.h"

namespace gnnaccel {
namespace {

constexpr int64_t kAhead = 8;  // edges between asking for a neighbour's sums and changing them
constexpr int kTries = 8;      // nodes that have no room in a part, before it counts as full
constexpr int64_t kFewMoves = 1 << 16;
constexpr int64_t kNowhere = -1;

// A network in parts: of each node the weight of its edges to each part, and each part's loads.
template <class I, class W>
class State {
 public:
  State(const Network& network, const Cut& cut, int64_t* part)
      : num_nodes(network.num_nodes),
        parts(cut.parts),
        part(part),
        indptr_(network.indptr),
        cols_(static_cast<const I*>(network.cols)),
        weights_(static_cast<const W*>(network.weights)),
        cut_(cut),
        sums_(static_cast<size_t>(num_nodes * parts)),
        loads_(static_cast<size_t>(2 * parts)) {
    for (int64_t v = 0; v < num_nodes; ++v) {
      W* to = row(v);
      for_neighbours(v, [&](int64_t u, W weight) { to[part[u]] += weight; });
      for (int kind = 0; kind < 2; ++kind) loads_[kind * parts + part[v]] += size(kind, v);
    }
  }

  const W* sums(int64_t v) const { return sums_.data() + v * parts; }

  template <class Body>
  void for_neighbours(int64_t v, const Body& body) const {
    for (int64_t e = indptr_[v]; e < indptr_[v + 1]; ++e) body(cols_[e], weights_ ? weights_[e] : W{1});
  }

  // By how much a part is above its cap, in edges or nodes.
  int64_t excess(int kind, int64_t p) const { return std::max(load(kind, p) - cut_.cap[kind], int64_t{0}); }

  // Whether part `p` has room for a node, of the first kinds of load.
  bool fits(int64_t v, int64_t p, int kinds = 2) const {
    for (int kind = 0; kind < kinds; ++kind)
      if (load(kind, p) + size(kind, v) > cut_.cap[kind]) return false;
    return true;
  }

  // Edges to a part that the node would have more inside its own than it has now.
  int64_t gain(int64_t v, int64_t to) const {
    return static_cast<int64_t>(sums(v)[to]) - static_cast<int64_t>(sums(v)[part[v]]);
  }

  // What the node's leaving takes off its part, of what that is above its cap, in shares of this.
  double relief(int kind, int64_t v) const {
    return static_cast<double>(std::min(size(kind, v), excess(kind, part[v]))) / static_cast<double>(cut_.cap[kind]);
  }

  // changed(u) for each neighbour of the node, when its sums are those after the move.
  template <class Changed>
  void move(int64_t v, int64_t to, const Changed& changed) {
    const int64_t from = part[v], end = indptr_[v + 1];
    for (int kind = 0; kind < 2; ++kind) {
      loads_[kind * parts + from] -= size(kind, v);
      loads_[kind * parts + to] += size(kind, v);
    }
    part[v] = to;
    for (int64_t e = indptr_[v]; e < end; ++e) {
      if (e + kAhead < end) __builtin_prefetch(row(cols_[e + kAhead]), 1);
      const W weight = weights_ ? weights_[e] : W{1};
      row(cols_[e])[from] -= weight;
      row(cols_[e])[to] += weight;
      changed(cols_[e]);
    }
  }

  const int64_t num_nodes;
  const int64_t parts;
  int64_t* const part;

 private:
  W* row(int64_t v) { return sums_.data() + v * parts; }
  int64_t size(int kind, int64_t v) const { return cut_.size[kind * num_nodes + v]; }
  int64_t load(int kind, int64_t p) const { return loads_[kind * parts + p]; }

  const int64_t* indptr_;
  const I* cols_;
  const W* weights_;
  const Cut cut_;
  std::vector<W> sums_;
  std::vector<int64_t> loads_;
};

// Parts above their cap of one kind give nodes away to those with room of this kind and those before it: first those
// that lose the fewest edges for what they take off.
template <class I, class W>
void relieve(State<I, W>& state, int kind) {
  using Entry = std::pair<double, int64_t>;  // edges gained for the relief, and -node
  const auto best = [&](int64_t v) {
    int64_t to = kNowhere;
    for (int64_t p = 0; p < state.parts; ++p) {
      if (p == state.part[v] || (to != kNowhere && state.sums(v)[p] <= state.sums(v)[to])) continue;
      if (state.fits(v, p, kind + 1)) to = p;
    }
    return to;
  };
  for (int64_t from = 0; from < state.parts; ++from) {
    if (state.excess(kind, from) == 0) continue;
    std::priority_queue<Entry> queue;
    const auto ask = [&](int64_t v, int64_t to) {
      const double relief = state.relief(kind, v);
      if (relief == 0) return;
      const auto gain = static_cast<double>(state.gain(v, to));
      queue.emplace(gain > 0 ? gain * relief : gain / relief, -v);
    };
    for (int64_t v = 0; v < state.num_nodes; ++v)
      if (const int64_t to = state.part[v] == from ? best(v) : kNowhere; to != kNowhere) ask(v, to);
    while (!queue.empty() && state.excess(kind, from) > 0) {
      const auto [worth, minus_node] = queue.top();
      const int64_t v = -minus_node;
      queue.pop();
      const int64_t to = state.part[v] == from ? best(v) : kNowhere;
      if (to == kNowhere) continue;
      const size_t before = queue.size();
      ask(v, to);
      if (queue.size() == before || queue.top().first < worth || queue.top().second != minus_node) continue;
      queue.pop();
      state.move(v, to, [&](int64_t u) {
        if (state.part[u] != from) return;
        if (const int64_t next = best(u); next != kNowhere) ask(u, next);
      });
    }
  }
}

template <class I, class W>
class Sweep {
 public:
  explicit Sweep(State<I, W>& state)
      : state_(state),
        queues_(static_cast<size_t>(state.parts)),
        waiting_(static_cast<size_t>(state.parts)),
        free_(static_cast<size_t>(state.num_nodes)),
        to_all_(state.num_nodes * state.parts <= kFewMoves) {}

  // Whether there are fewer edges between parts than before.
  bool run(int64_t patience) {
    std::fill(free_.begin(), free_.end(), char{1});
    for (int64_t p = 0; p < state_.parts; ++p) {
      queues_[p] = {};
      waiting_[p].clear();
    }
    trail_.clear();
    for (int64_t v = 0; v < state_.num_nodes; ++v)
      for (int64_t p = 0; p < state_.parts; ++p) ask(v, p);
    int64_t gained = 0, most = 0;
    size_t kept = 0;
    while (static_cast<int64_t>(trail_.size() - kept) < patience) {
      const int64_t to = best_queue();
      if (to == kNowhere) break;
      const int64_t v = -queues_[to].top().second, from = state_.part[v];
      gained += state_.gain(v, to);
      free_[v] = 0;
      trail_.emplace_back(v, from);
      state_.move(v, to, [&](int64_t u) {
        if (!free_[u]) return;
        if (const int64_t own = state_.part[u]; own != from && own != to)
          for (const int64_t p : {from, to}) ask(u, p);
        else
          for (int64_t p = 0; p < state_.parts; ++p) ask(u, p);
      });
      for (const Entry& entry : waiting_[from]) queues_[from].push(entry);  // there is more room now
      waiting_[from].clear();
      if (gained > most) {
        most = gained;
        kept = trail_.size();
      }
    }
    for (size_t i = trail_.size(); i > kept; --i)
      state_.move(trail_[i - 1].first, trail_[i - 1].second, [](int64_t) {});
    return kept > 0;
  }

 private:
  using Entry = std::pair<int64_t, int64_t>;  // gain, and -node: of several the lowest

  void ask(int64_t v, int64_t p) {
    if (p != state_.part[v] && (to_all_ || state_.sums(v)[p] > 0)) queues_[p].emplace(state_.gain(v, p), -v);
  }

  // The part whose queue begins with the move that gains most, of those with room; what was queued before a neighbour
  // moved is left out.
  int64_t best_queue() {
    int64_t best = kNowhere;
    for (int64_t p = 0; p < state_.parts; ++p) {
      auto& queue = queues_[p];
      for (int tries = 0; tries < kTries && !queue.empty();) {
        const auto [gain, minus_node] = queue.top();
        const int64_t v = -minus_node;
        const bool counts = free_[v] && state_.part[v] != p && state_.gain(v, p) == gain;
        if (counts && state_.fits(v, p)) {
          if (best == kNowhere || gain > queues_[best].top().first) best = p;
          break;
        }
        if (counts) {
          waiting_[p].push_back(queue.top());
          ++tries;
        }
        queue.pop();
      }
    }
    return best;
  }

  State<I, W>& state_;
  std::vector<std::priority_queue<Entry>> queues_;  // for each part: moves into it
  std::vector<std::vector<Entry>> waiting_;         // those that had no room
  std::vector<char> free_;
  const bool to_all_;  // also to parts that have no neighbours of a node: what makes room for others
  std::vector<std::pair<int64_t, int64_t>> trail_;  // moved nodes, and where each was
};

template <class I, class W>
void sweep(const Network& network, const Cut& cut, int64_t* part, int64_t sweeps, int64_t patience) {
  State<I, W> state(network, cut, part);
  relieve(state, 0);
  relieve(state, 1);
  Sweep<I, W> each(state);
  for (int64_t i = 0; i < sweeps && each.run(patience); ++i) {
  }
}

// Pairs of a node and a part beside its own that has neighbours of it: what a move adds to them, of the node itself and
// of its neighbours.
template <class I, class W>
class Pairs {
 public:
  explicit Pairs(State<I, W>& state) : state_(state), several_(static_cast<size_t>(state.num_nodes)) {}

  // Whether any node has moved.
  bool pass() {
    bool moved = false;
    std::vector<int64_t> to, added;
    for (int64_t v = 0; v < state_.num_nodes; ++v) {
      const int64_t own = state_.part[v];
      const W* sums = state_.sums(v);
      to.clear();
      for (int64_t p = 0; p < state_.parts; ++p)
        if (p != own && sums[p] > 0 && state_.fits(v, p)) to.push_back(p);
      if (to.empty()) continue;
      count(v, to, added);
      size_t best = 0;
      for (size_t i = 1; i < to.size(); ++i)
        if (added[i] < added[best] || (added[i] == added[best] && sums[to[i]] > sums[to[best]])) best = i;
      if (added[best] > 0 || (added[best] == 0 && sums[to[best]] <= sums[own])) continue;
      state_.move(v, to[best], [](int64_t) {});
      moved = true;
    }
    return moved;
  }

 private:
  void count(int64_t v, const std::vector<int64_t>& to, std::vector<int64_t>& added) {
    const int64_t own = state_.part[v];
    added.assign(to.size(), (state_.sums(v)[own] > 0) - 1);
    state_.for_neighbours(v, [&](int64_t u, W weight) { several_[u] += weight; });
    int64_t fewer = 0;
    state_.for_neighbours(v, [&](int64_t u, W) {
      if (several_[u] == 0) return;
      const W* sums = state_.sums(u);
      const int64_t theirs = state_.part[u];
      fewer += theirs != own && sums[own] == several_[u];
      for (size_t i = 0; i < to.size(); ++i) added[i] += theirs != to[i] && sums[to[i]] == 0;
      several_[u] = 0;
    });
    for (int64_t& each : added) each -= fewer;
  }

  State<I, W>& state_;
  std::vector<W> several_;  // the weight of the edges between this node and each
};

template <class I, class W>
void grow(const Network& network, const double* work, int64_t parts, int64_t first, int64_t* part) {
  const int64_t n = network.num_nodes;
  const auto* cols = static_cast<const I*>(network.cols);
  const auto* weights = static_cast<const W*>(network.weights);
  std::vector<double> near(static_cast<size_t>(n)), left(static_cast<size_t>(n), 0.0);
  std::vector<char> free(static_cast<size_t>(n), 1);
  double remaining = 0;
  for (int64_t v = 0; v < n; ++v) {
    remaining += work[v];
    for (int64_t e = network.indptr[v]; e < network.indptr[v + 1]; ++e)
      left[v] += weights ? static_cast<double>(weights[e]) : 1.0;
  }
  std::fill(part, part + n, parts - 1);
  for (int64_t p = 0; p + 1 < parts; ++p) {
    const double goal = remaining / static_cast<double>(parts - p);
    double held = 0;
    std::fill(near.begin(), near.end(), 0.0);
    while (true) {
      int64_t node = free[first] ? first : kNowhere;
      double most = -1;
      for (int64_t v = 0; v < n && !free[first]; ++v) {
        if (!free[v]) continue;
        const double worth = near[v] / std::max(left[v], 1e-9);
        if (worth > most) {
          most = worth;
          node = v;
        }
      }
      if (node == kNowhere || (held > 0 && held + work[node] / 2 > goal)) break;
      part[node] = p;
      free[node] = 0;
      held += work[node];
      remaining -= work[node];
      for (int64_t e = network.indptr[node]; e < network.indptr[node + 1]; ++e) {
        const double weight = weights ? static_cast<double>(weights[e]) : 1.0;
        near[cols[e]] += weight;
        left[cols[e]] -= weight;
      }
    }
    double most = -1;  // the next begins where most is left
    for (int64_t v = 0; v < n; ++v) {
      if (!free[v] || left[v] <= most) continue;
      most = left[v];
      first = v;
    }
  }
}

// body(first, second): zeros of the network's types.
template <class Body>
void with_types(const Network& network, const Body& body) {
  const bool wide = network.weight_type == IndexType::i64;
  if (network.col_type == IndexType::i64)
    wide ? body(int64_t{}, int64_t{}) : body(int64_t{}, int32_t{});
  else
    wide ? body(int32_t{}, int64_t{}) : body(int32_t{}, int32_t{});
}

}  // namespace

void part_sweeps(const Network& network, const Cut& cut, int64_t* part, int64_t sweeps, int64_t patience, int) {
  with_types(network, [&](auto index, auto weight) {
    sweep<decltype(index), decltype(weight)>(network, cut, part, sweeps, patience);
  });
}

void part_halo_moves(const Network& network, const Cut& cut, int64_t* part, int64_t passes, int) {
  with_types(network, [&](auto index, auto weight) {
    State<decltype(index), decltype(weight)> state(network, cut, part);
    Pairs<decltype(index), decltype(weight)> pairs(state);
    for (int64_t i = 0; i < passes && pairs.pass(); ++i) {
    }
  });
}

void part_growth(const Network& network, const double* work, int64_t parts, int64_t first, int64_t* part, int) {
  with_types(network, [&](auto index, auto weight) {
    grow<decltype(index), decltype(weight)>(network, work, parts, first, part);
  });
}

}  // namespace gnnaccel
