// Edges between given nodes, on the CPU: the sources are entered once, then each target's row is read twice, to count
// and to write.
#include <algorithm>

#include "parallel.h"
#include "sampling.h"

namespace gnnaccel {
namespace {

constexpr int64_t kChunk = 16;  // targets of a task

template <class I>
struct Given {
  const I* nodes;
  const I* trees;
  int64_t count;
  int64_t tree(int64_t i) const { return trees ? trees[i] : 0; }
};

template <class I, class Places>
Samples induce(const Relation& relation, const Given<I>& targets, const Given<I>& sources, int64_t num_nodes,
               Places& places, int threads) {
  const I* indptr = static_cast<const I*>(relation.indptr);
  const I* indices = static_cast<const I*>(relation.indices);
  for (int64_t i = 0; i < sources.count; ++i) {
    if (sources.nodes[i] < 0 || (num_nodes >= 0 && sources.nodes[i] >= num_nodes))
      refuse("induced_subgraph: nodes: expected nodes in [0, " + std::to_string(num_nodes) + "), got " +
             std::to_string(sources.nodes[i]));
    places.enter(sources.nodes[i], sources.tree(i), i);
  }
  int64_t work = 0;
  for (int64_t i = 0; i < targets.count; ++i) {
    const I node = targets.nodes[i];
    if (node < 0 || node >= relation.num_rows)
      refuse("induced_subgraph: nodes: expected nodes in [0, " + std::to_string(relation.num_rows) + "), got " +
             std::to_string(node));
    if (indptr[node] < 0 || indptr[node + 1] < indptr[node] || indptr[node + 1] > relation.nnz)
      refuse("induced_subgraph: indptr: expected ascending places in indices, got " + std::to_string(indptr[node]) +
             " and " + std::to_string(indptr[node + 1]) + " for node " + std::to_string(node));
    work += indptr[node + 1] - indptr[node];
  }
  // For each edge of a chunk's targets that stays: its target, place and source's place.
  const auto visit = [&](int64_t chunk, const auto& body) {
    for (int64_t i = chunk * kChunk; i < std::min(targets.count, (chunk + 1) * kChunk); ++i)
      for (I k = indptr[targets.nodes[i]]; k < indptr[targets.nodes[i] + 1]; ++k) {
        if (indices[k] < 0 || (num_nodes >= 0 && indices[k] >= num_nodes))
          refuse("induced_subgraph: indices: expected nodes in [0, " + std::to_string(num_nodes) + "), got " +
                 std::to_string(indices[k]) + " at place " + std::to_string(k));
        const int64_t place = places.find(indices[k], targets.tree(i));
        if (place >= 0) body(i, k, place);
      }
  };
  const int64_t chunks = (targets.count + kChunk - 1) / kChunk;
  threads = useful_threads(work * 4, threads);
  std::vector<int64_t> offsets(static_cast<size_t>(chunks) + 1);
  Samples out;
  out.edges_per_hop.emplace_back(targets.count);
  parallel_for(chunks, threads, [&](int64_t chunk) {
    int64_t sum = 0;
    visit(chunk, [&](int64_t i, I, int64_t) {
      ++out.edges_per_hop[0][static_cast<size_t>(i)];
      ++sum;
    });
    offsets[static_cast<size_t>(chunk) + 1] = sum;
  });
  for (size_t chunk = 0; chunk < static_cast<size_t>(chunks); ++chunk) offsets[chunk + 1] += offsets[chunk];
  Growing<I> rows, cols, ids;
  I* to_rows = rows.extend(offsets.back());
  I* to_cols = cols.extend(offsets.back());
  I* to_ids = ids.extend(offsets.back());
  parallel_for(chunks, threads, [&](int64_t chunk) {
    int64_t at = offsets[static_cast<size_t>(chunk)];
    visit(chunk, [&](int64_t i, I k, int64_t place) {
      if (at >= offsets[static_cast<size_t>(chunk) + 1]) return;  // somebody writes into the graph just now
      to_rows[at] = static_cast<I>(place);
      to_cols[at] = static_cast<I>(i);
      to_ids[at++] = k;
    });
  });
  out.rows.push_back(rows.release());
  out.cols.push_back(cols.release());
  out.edges.push_back(ids.release());
  return out;
}

template <class I>
Samples run(const Relation& relation, const Given<I>& targets, const Given<I>& sources, int64_t num_nodes,
            const Draw& draw, int threads) {
  if (sources.count >= kMostNodes) refuse("induced_subgraph: nodes: expected fewer than 2^31");
  if (draw.table && !sources.trees) {
    Table places(draw.table, draw.stamp);
    return induce(relation, targets, sources, num_nodes, places, threads);
  }
  Hash places;
  return induce(relation, targets, sources, num_nodes, places, threads);
}

}  // namespace

Samples induced_subgraph(const Relation& relation, const void* targets, const void* target_trees, int64_t num_targets,
                         const void* sources, const void* source_trees, int64_t num_sources, int64_t num_nodes,
                         const Draw& draw, int threads) {
  const auto of_type = [&](auto zero) {
    using I = decltype(zero);
    const auto of = [](const void* array) { return static_cast<const I*>(array); };
    return run<I>(relation, {of(targets), of(target_trees), num_targets}, {of(sources), of(source_trees), num_sources},
                  num_nodes, draw, threads);
  };
  return draw.index_type == IndexType::i64 ? of_type(int64_t{0}) : of_type(int32_t{0});
}

}  // namespace gnnaccel
