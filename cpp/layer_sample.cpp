// HGT's sampling by layers, on the CPU. Batches are small, and each draw depends on those before: one thread.
#include <algorithm>

#include "pick.h"
#include "sampling.h"

namespace gnnaccel {
namespace {

constexpr int64_t kShared = 50;  // sources that a node gives something to, of one relation

// The nodes of one type: those in the batch, and those that may come into it, with what they were given.
template <class I>
struct Pool {
  Hash in_batch;
  Growing<I> ids;
  int64_t fresh = 0;  // the first that the last hop added
  Hash in_budget;
  std::vector<I> candidates;
  std::vector<double> budget;  // 0: in the batch by now
};

template <class I>
class LayerSampler {
 public:
  LayerSampler(const std::vector<NodeType>& types, const std::vector<Relation>& relations, const Draw& draw)
      : types_(types), relations_(relations), draw_(draw), pools_(types.size()) {}

  Samples run(const std::vector<std::vector<int64_t>>& counts) {
    Samples out;
    out.nodes_per_hop.resize(types_.size());
    for (size_t t = 0; t < types_.size(); ++t) start(t);
    for (int64_t hop = 0; hop <= draw_.num_hops; ++hop) {
      if (hop > 0)
        for (size_t t = 0; t < types_.size(); ++t) take(pools_[t], counts[t][static_cast<size_t>(hop) - 1]);
      for (size_t t = 0; t < types_.size(); ++t) out.nodes_per_hop[t].push_back(pools_[t].ids.size() - pools_[t].fresh);
      if (hop == draw_.num_hops) break;
      for (const Relation& relation : relations_) give(relation);
      for (auto& pool : pools_) pool.fresh = pool.ids.size();
    }
    for (auto& pool : pools_) out.nodes.push_back(pool.ids.release());
    return out;
  }

 private:
  void start(size_t t) {
    const NodeType& type = types_[t];
    const I* seeds = static_cast<const I*>(type.seeds);
    I* ids = pools_[t].ids.extend(type.num_seeds);
    for (int64_t i = 0; i < type.num_seeds; ++i) {
      check(seeds[i], type.num_nodes, "seeds");
      ids[i] = seeds[i];
      pools_[t].in_batch.enter(seeds[i], 0, i);
    }
  }

  // What the nodes of the last hop give to their sources.
  void give(const Relation& relation) {
    auto& to = pools_[static_cast<size_t>(relation.target)];
    auto& from = pools_[static_cast<size_t>(relation.source)];
    const int64_t num_sources = types_[static_cast<size_t>(relation.source)].num_nodes;
    const I* indptr = static_cast<const I*>(relation.indptr);
    const I* indices = static_cast<const I*>(relation.indices);
    Picker<I> picker(relation, draw_, draw_.seed, ++streams_);
    std::vector<I> places;
    for (int64_t i = to.fresh; i < to.ids.size(); ++i) {
      const I node = to.ids.data()[i];
      check(node, relation.num_rows, "indptr");
      const I first = indptr[node], end = indptr[node + 1];
      if (first < 0 || end < first || end > relation.nnz)
        refuse("hgt_sample: indptr: expected ascending places in indices for node " + std::to_string(node));
      const I count = static_cast<I>(std::min<int64_t>(end - first, kShared));
      places.resize(static_cast<size_t>(count));
      picker.pick({first, end - first, count}, count == end - first, i, places.data());
      for (const I place : places) {
        const I source = indices[place];
        check(source, num_sources, "indices");
        if (from.in_batch.find(source, 0) < 0) add(from, source, 1.0 / static_cast<double>(count));
      }
    }
  }

  void add(Pool<I>& pool, I node, double share) {
    const auto next = static_cast<int64_t>(pool.candidates.size());
    if (next + 1 >= kMostNodes) refuse("hgt_sample: a batch with more than 2^31 neighbours");
    const auto place = static_cast<size_t>(pool.in_budget.enter(node, 0, next));
    if (place == pool.candidates.size()) {
      pool.candidates.push_back(node);
      pool.budget.push_back(0);
    }
    pool.budget[place] += share;
  }

  void take(Pool<I>& pool, int64_t count) {
    Random random(draw_.seed, ++streams_);
    keys_.clear();
    for (size_t i = 0; i < pool.candidates.size(); ++i)
      if (const double share = pool.budget[i]; share > 0)
        keys_.emplace_back(-std::log(random.unit()) / (share * share), i);
    count = std::min(count, static_cast<int64_t>(keys_.size()));
    std::partial_sort(keys_.begin(), keys_.begin() + count, keys_.end());
    I* ids = pool.ids.extend(count);
    for (int64_t k = 0; k < count; ++k) {
      const size_t candidate = keys_[static_cast<size_t>(k)].second;
      ids[k] = pool.candidates[candidate];
      pool.in_batch.enter(ids[k], 0, pool.ids.size() - count + k);
      pool.budget[candidate] = 0;
    }
  }

  static void check(I node, int64_t num_nodes, const char* what) {
    if (node < 0 || (num_nodes >= 0 && node >= num_nodes))
      refuse(std::string("hgt_sample: ") + what + ": expected nodes in [0, " + std::to_string(num_nodes) + "), got " +
             std::to_string(node));
  }

  const std::vector<NodeType>& types_;
  const std::vector<Relation>& relations_;
  const Draw& draw_;
  std::vector<Pool<I>> pools_;
  std::vector<std::pair<double, size_t>> keys_;
  uint64_t streams_ = 0;  // of random numbers, so far
};

}  // namespace

Samples layer_sample(const std::vector<NodeType>& types, const std::vector<Relation>& relations,
                     const std::vector<std::vector<int64_t>>& counts, const Draw& draw, int) {
  if (draw.index_type == IndexType::i64) return LayerSampler<int64_t>(types, relations, draw).run(counts);
  return LayerSampler<int32_t>(types, relations, draw).run(counts);
}

}  // namespace gnnaccel
