// Neighbour sampling on the CPU. A hop over one relation runs in three steps:
//   1. how many edges each destination will have, and so where they go;
//   2. which edges: chunks of destinations, on any thread;
//   3. the sources' places among the nodes of the batch: chunk by chunk in order, by one thread at a time, while the
//      others are at step 2 of later chunks. No result depends on which.
#include "sampling.h"

#include <algorithm>
#include <atomic>
#include <variant>

#include "parallel.h"
#include "pick.h"

namespace gnnaccel {

Array::~Array() { std::free(data); }

namespace {

constexpr int64_t kChunk = 128;  // destinations of a task
constexpr int64_t kAhead = 24;   // elements between asking for a line of memory and reading it
constexpr int64_t kWork = 16;    // what an edge costs, in the elements that useful_threads() counts

// Work on chunks that has to be done in their order, by whichever thread comes by: none waits for another.
class Line {
 public:
  explicit Line(int64_t chunks) : ready_(static_cast<size_t>(chunks)) {
    for (auto& ready : ready_) ready = false;
  }
  void add(int64_t chunk) { ready_[static_cast<size_t>(chunk)].store(true, std::memory_order_release); }
  // body(chunk) for those whose turn it is, unless another thread is at it. One may stay behind that is added just when
  // that thread leaves: the last to call, when all threads are done, finds it.
  template <class Body>
  void advance(const Body& body) {
    while (is_ready() && !busy_.test_and_set(std::memory_order_acquire)) {
      while (is_ready()) {
        const int64_t chunk = next_.load(std::memory_order_relaxed);
        body(chunk);
        next_.store(chunk + 1, std::memory_order_relaxed);
      }
      busy_.clear(std::memory_order_release);
    }
  }

 private:
  bool is_ready() const {
    const auto next = static_cast<size_t>(next_.load(std::memory_order_relaxed));
    return next < ready_.size() && ready_[next].load(std::memory_order_acquire);
  }
  std::vector<std::atomic<bool>> ready_;
  std::atomic<int64_t> next_{0};
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

// The nodes of one type in the batch.
template <class I>
struct Nodes {
  Growing<I> ids;
  Growing<I> trees;
  std::variant<Hash, Table> places;
  int64_t begin = 0;  // those that the next hop draws for
  int64_t end = 0;
};

template <class I>
struct Edges {
  Growing<I> rows, cols, ids;
};

template <class I>
class Sampler {
 public:
  Sampler(const std::vector<NodeType>& types, const std::vector<Relation>& relations, const Draw& draw, int threads)
      : types_(types),
        relations_(relations),
        draw_(draw),
        threads_(threads),
        nodes_(types.size()),
        edges_(relations.size()) {}

  Samples run() {
    out_.nodes_per_hop.resize(types_.size());
    out_.edges_per_hop.resize(relations_.size());
    for (size_t t = 0; t < types_.size(); ++t) start(t);
    for (int64_t hop = 0; hop < draw_.num_hops; ++hop) {
      seed_ = draw_.seed + (draw_.resample ? static_cast<uint64_t>(hop) : 0);  // or a node would draw the same again
      for (size_t r = 0; r < relations_.size(); ++r) expand(r, hop);
      for (size_t t = 0; t < types_.size(); ++t) {
        const int64_t before = nodes_[t].end;
        nodes_[t].begin = draw_.resample ? 0 : before;
        nodes_[t].end = nodes_[t].ids.size();
        out_.nodes_per_hop[t].push_back(nodes_[t].end - before);
      }
    }
    for (auto& nodes : nodes_) {
      out_.nodes.push_back(nodes.ids.release());
      if (draw_.disjoint) out_.trees.push_back(nodes.trees.release());
    }
    for (auto& edges : edges_) {
      out_.rows.push_back(edges.rows.release());
      out_.cols.push_back(edges.cols.release());
      out_.edges.push_back(edges.ids.release());
    }
    return std::move(out_);
  }

 private:
  void start(size_t t) {
    const NodeType& type = types_[t];
    auto& nodes = nodes_[t];
    if (type.place >= 0 && !draw_.disjoint) nodes.places.template emplace<Table>(draw_.table + type.place, draw_.stamp);
    const I* seeds = static_cast<const I*>(type.seeds);
    I* ids = nodes.ids.extend(type.num_seeds);
    I* trees = draw_.disjoint ? nodes.trees.extend(type.num_seeds) : nullptr;
    std::visit(
        [&](auto& places) {
          for (int64_t i = 0; i < type.num_seeds; ++i) {
            if (seeds[i] < 0 || (type.num_nodes >= 0 && seeds[i] >= type.num_nodes))
              refuse("neighbor_sample: seeds: expected nodes in [0, " + std::to_string(type.num_nodes) + "), got " +
                     std::to_string(seeds[i]));
            ids[i] = seeds[i];
            if (trees) trees[i] = static_cast<I>(type.first_seed + i);
            places.enter(seeds[i], trees ? trees[i] : 0, i);
          }
        },
        nodes.places);
    nodes.end = type.num_seeds;
    out_.nodes_per_hop[t].push_back(type.num_seeds);
  }

  // The edges of row `node` that may be drawn from at this seed's time.
  Row<I> row_of(const Relation& relation, I node, int64_t tree, int64_t fanout) const {
    const I* indptr = static_cast<const I*>(relation.indptr);
    if (node >= relation.num_rows)
      refuse("neighbor_sample: indptr: node " + std::to_string(node) + " has no row: there are " +
             std::to_string(relation.num_rows));
    I first = indptr[node], end = indptr[node + 1];
    if (first < 0 || end < first || end > relation.nnz)
      refuse("neighbor_sample: indptr: expected ascending places in indices, got " + std::to_string(first) + " and " +
             std::to_string(end) + " for node " + std::to_string(node));
    if (fanout == 0) end = first;
    if (timed(relation) && first < end) {
      end = early_enough(relation, first, end, draw_.seed_time[tree]);
      if (draw_.last && fanout >= 0 && end - first > fanout) first = end - static_cast<I>(fanout);
    }
    const I size = end - first;
    I count = size;
    if (fanout >= 0 && size > 0) {
      count = draw_.replace ? static_cast<I>(fanout) : static_cast<I>(std::min<int64_t>(size, fanout));
      if (relation.weight && (draw_.replace || size > fanout)) count = drawable(relation, first, end, count);
    }
    return {first, size, count};
  }

  // `count`, or how many can be drawn if edges of weight 0 cannot.
  I drawable(const Relation& relation, I first, I end, I count) const {
    const I enough = draw_.replace ? 1 : count;
    I found = 0;
    with_weights(relation, [&](const auto* weights) {
      for (I k = first; k < end && found < enough; ++k) found += weights[k] != 0;
    });
    return found == enough ? count : found;
  }

  int64_t time_of(const Relation& relation, I place) const {
    if (relation.edge_time) return relation.edge_time[place];
    return types_[static_cast<size_t>(relation.source)].node_time[neighbour(relation, place)];
  }

  bool timed(const Relation& relation) const {
    return draw_.seed_time && (relation.edge_time || types_[static_cast<size_t>(relation.source)].node_time);
  }

  I early_enough(const Relation& relation, I first, I end, int64_t time) const {
    I low = first, high = end;
    while (low < high) {
      const I middle = low + (high - low) / 2;
      if (time_of(relation, middle) <= time)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  I neighbour(const Relation& relation, I place) const {
    const I node = static_cast<const I*>(relation.indices)[place];
    const int64_t num_nodes = types_[static_cast<size_t>(relation.source)].num_nodes;
    if (node < 0 || (num_nodes >= 0 && node >= num_nodes))
      refuse("neighbor_sample: indices: expected nodes in [0, " + std::to_string(num_nodes) + "), got " +
             std::to_string(node) + " at place " + std::to_string(place));
    return node;
  }

  void expand(size_t r, int64_t hop) {
    const Relation& relation = relations_[r];
    auto& to = nodes_[static_cast<size_t>(relation.target)];
    const int64_t fanout = relation.fanouts[static_cast<size_t>(hop)];
    const int64_t total = fanout == 0 ? 0 : plan(relation, to, fanout);
    out_.edges_per_hop[r].push_back(total);
    if (total == 0) return;
    auto& from = nodes_[static_cast<size_t>(relation.source)];
    if (from.ids.size() + total > kMostNodes || (sizeof(I) == 4 && edges_[r].ids.size() + total >= kMostNodes))
      refuse("neighbor_sample: num_neighbors: a batch of more than 2^31 nodes, or of as many edges of 32 bits");
    from.ids.reserve(total);  // readers of another chunk must not see it move
    if (draw_.disjoint) from.trees.reserve(total);
    row_trees_ = draw_.disjoint ? to.trees.data() + to.begin : nullptr;
    auto& out = edges_[r];
    const Target target{out.rows.extend(total), out.cols.extend(total), out.ids.extend(total)};
    Line line(chunks_);
    const auto number_chunk = [&](int64_t chunk) {
      std::visit([&](auto& places) { number(places, from, chunk, target); }, from.places);
    };
    parallel_for(chunks_, useful_threads(total * kWork, threads_), [&](int64_t chunk) {
      fill(relation, r, fanout < 0, chunk, target);
      line.add(chunk);
      line.advance(number_chunk);
    });
    line.advance(number_chunk);
  }

  struct Target {
    I* rows;
    I* cols;
    I* ids;
  };

  // Step 1. The number of edges.
  int64_t plan(const Relation& relation, Nodes<I>& to, int64_t fanout) {
    const int64_t count = to.end - to.begin;
    const I* ids = to.ids.data() + to.begin;
    first_ = to.begin;
    row_trees_ = draw_.disjoint ? to.trees.data() + to.begin : nullptr;
    rows_.resize(static_cast<size_t>(count));
    chunks_ = (count + kChunk - 1) / kChunk;
    offsets_.assign(static_cast<size_t>(chunks_) + 1, 0);
    const I* indptr = static_cast<const I*>(relation.indptr);
    parallel_for(chunks_, useful_threads(count * kWork, threads_), [&](int64_t chunk) {
      const int64_t stop = std::min(count, (chunk + 1) * kChunk);
      int64_t sum = 0;
      for (int64_t i = chunk * kChunk; i < stop; ++i) {
        if (i + kAhead < count) __builtin_prefetch(indptr + ids[i + kAhead]);
        const Row<I>& row = rows_[static_cast<size_t>(i)] =
            row_of(relation, ids[i], row_trees_ ? row_trees_[i] : 0, fanout);
        sum += row.count;
      }
      offsets_[static_cast<size_t>(chunk) + 1] = sum;
    });
    for (size_t chunk = 0; chunk < static_cast<size_t>(chunks_); ++chunk) offsets_[chunk + 1] += offsets_[chunk];
    return offsets_.back();
  }

  // Step 2. Places in indices and destinations of a chunk's edges, and in rows the numbers of their sources.
  void fill(const Relation& relation, size_t r, bool all, int64_t chunk, const Target& target) const {
    Picker<I> picker(relation, draw_, seed_, r);
    const I* indices = static_cast<const I*>(relation.indices);
    const int64_t begin = offsets_[static_cast<size_t>(chunk)], end = offsets_[static_cast<size_t>(chunk) + 1];
    int64_t at = begin;
    for_rows(chunk, [&](const Row<I>& row, int64_t i) {
      picker.pick(row, all || (!draw_.replace && row.count == row.size), first_ + i, target.ids + at);
      std::fill_n(target.cols + at, row.count, static_cast<I>(first_ + i));
      at += row.count;
    });
    for (int64_t e = begin; e < std::min(begin + kAhead, end); ++e) __builtin_prefetch(indices + target.ids[e]);
    for (int64_t e = begin; e < end; ++e) {
      if (e + kAhead < end) __builtin_prefetch(indices + target.ids[e + kAhead]);
      target.rows[e] = neighbour(relation, target.ids[e]);
    }
    if (timed(relation)) check_times(relation, chunk, target);
  }

  void check_times(const Relation& relation, int64_t chunk, const Target& target) const {
    int64_t at = offsets_[static_cast<size_t>(chunk)];
    for_rows(chunk, [&](const Row<I>& row, int64_t i) {
      for (I k = 0; k < row.count; ++k, ++at)
        if (time_of(relation, target.ids[at]) > draw_.seed_time[row_trees_[i]])
          refuse(
              "neighbor_sample: time: expected the edges of each destination in ascending order of time, got a "
              "later one at place " +
              std::to_string(target.ids[at]));
    });
  }

  // Step 3. Places of a chunk's sources in place of their numbers.
  template <class Places>
  void number(Places& places, Nodes<I>& from, int64_t chunk, const Target& target) {
    const int64_t end = offsets_[static_cast<size_t>(chunk) + 1];
    int64_t at = offsets_[static_cast<size_t>(chunk)], next = from.ids.size();
    for_rows(chunk, [&](const Row<I>& row, int64_t i) {
      const int64_t tree = row_trees_ ? row_trees_[i] : 0;
      for (I k = 0; k < row.count; ++k, ++at) {
        if (at + kAhead < end) places.prefetch(target.rows[at + kAhead], tree);
        const I node = target.rows[at];
        const int64_t place = places.enter(node, tree, next);
        target.rows[at] = static_cast<I>(place);
        if (place != next) continue;
        from.ids.push(node);
        if (row_trees_) from.trees.push(static_cast<I>(tree));
        ++next;
      }
    });
  }

  template <class Body>
  void for_rows(int64_t chunk, const Body& body) const {
    const int64_t stop = std::min(static_cast<int64_t>(rows_.size()), (chunk + 1) * kChunk);
    for (int64_t i = chunk * kChunk; i < stop; ++i) body(rows_[static_cast<size_t>(i)], i);
  }

  const std::vector<NodeType>& types_;
  const std::vector<Relation>& relations_;
  const Draw& draw_;
  const int threads_;
  std::vector<Nodes<I>> nodes_;
  std::vector<Edges<I>> edges_;
  Samples out_;
  // Of the hop and relation at work: its seed; its destinations, from place first_ on, in chunks.
  uint64_t seed_ = 0;
  int64_t first_ = 0;
  int64_t chunks_ = 0;
  const I* row_trees_ = nullptr;
  std::vector<Row<I>> rows_;
  std::vector<int64_t> offsets_;  // [chunks + 1]: first edge of each
};

}  // namespace

Samples neighbor_sample(const std::vector<NodeType>& types, const std::vector<Relation>& relations, const Draw& draw,
                        int threads) {
  if (draw.index_type == IndexType::i64) return Sampler<int64_t>(types, relations, draw, threads).run();
  return Sampler<int32_t>(types, relations, draw, threads).run();
}

}  // namespace gnnaccel
