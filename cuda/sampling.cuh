// What neighbour sampling on the GPU is made of: the CPU's random numbers (cpp/sampling.h), Floyd's algorithm by a
// group of lanes, where each node first appears, and a step of a batch.
#pragma once

#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace sample_impl {

constexpr uint32_t kNone = ~0u;

// Number `counter` of a row, brought below `bound` (Lemire, 2019). False if it has to be passed over, so that every
// value is exactly as likely.
__device__ __forceinline__ bool drawn_below(uint64_t row_seed, uint64_t counter, uint64_t bound, uint64_t& value) {
  const uint64_t number = splitmix64(row_seed, counter), low = number * bound;
  value = __umul64hi(number, bound);
  return low >= bound || low >= (0 - bound) % bound;
}

// The draw of each lane of a group of L below its own bound, as if they came one after the other: those from one on
// that has to be passed over take the next number. Lanes begin at `counter`; `passed` are those passed over before, in
// and out. All lanes of the warp call it together.
template <int L>
__device__ __forceinline__ uint64_t draw(bool active, uint64_t bound, uint64_t row_seed, uint64_t counter,
                                         uint64_t& passed) {
  const int lane = threadIdx.x % L;
  uint64_t value = 0, more = passed;
  for (;;) {
    const bool again = active && !drawn_below(row_seed, counter + more, bound, value);
    if (!__any_sync(~0u, again)) break;
    const unsigned those = group_ballot<L>(again);
    if (those && lane >= __ffs(those) - 1) ++more;
  }
  passed = __shfl_sync(~0u, more, L - 1, L);
  return value;
}

// Floyd's algorithm takes a draw, or where that was taken before, the draw's highest number, its top. The draw of a
// lane was taken if one before has drawn the same (`replaced` says so), or if it is the top of one before that took its
// top; that one is lane `next`, -1 for none. Follows these, doubling.
template <int L>
__device__ __forceinline__ bool follow(bool replaced, int next) {
  const int lane = threadIdx.x % L;
#pragma unroll
  for (int length = 1; length < L; length *= 2) {
    const int from = next < 0 ? lane : next;
    const bool its = __shfl_sync(~0u, static_cast<int>(replaced), from, L) != 0;
    const int further = __shfl_sync(~0u, next, from, L);
    if (next >= 0) {
      replaced = replaced || its;
      next = further;
    }
  }
  return replaced;
}

// Where each node first appears: the least key of a number, which is that of a node, or of a node and its tree. The
// outcome depends on no order of the threads. A cell for each node of the graph, all kNone at first.
class Cells {
 public:
  Cells(void* table, int64_t) : keys_(static_cast<uint32_t*>(table)) {}
  __device__ __forceinline__ void enter(uint64_t number, uint32_t key) const { atomicMin(keys_ + number, key); }
  __device__ __forceinline__ uint32_t find(uint64_t number) const { return keys_[number]; }

 private:
  uint32_t* keys_;
};

// The same by hashing, for trees, and graphs of more nodes than a batch may hold. All bytes 0xFF at first. There are
// twice as many slots as numbers.
template <typename Word>
class Slots {
 public:
  Slots(void* table, int64_t slots)
      : numbers_(static_cast<Word*>(table)), keys_(reinterpret_cast<uint32_t*>(numbers_ + slots)), last_(slots - 1) {}
  __device__ __forceinline__ void enter(uint64_t number, uint32_t key) const {
    const Word word = static_cast<Word>(number), empty = ~Word{0};
    for (uint64_t at = home(word);; at = (at + 1) & last_) {
      const Word there = atomicCAS(numbers_ + at, empty, word);
      if (there != empty && there != word) continue;
      atomicMin(keys_ + at, key);
      return;
    }
  }
  __device__ __forceinline__ uint32_t find(uint64_t number) const {  // one that has been entered
    const Word word = static_cast<Word>(number);
    uint64_t at = home(word);
    while (numbers_[at] != word) at = (at + 1) & last_;
    return keys_[at];
  }

 private:
  __device__ __forceinline__ uint64_t home(Word word) const { return splitmix64(0, word) & last_; }
  Word* numbers_;
  uint32_t* keys_;
  uint64_t last_;
};

// One type of nodes as kernels see it.
template <typename I>
struct Nodes {
  const int64_t* time;
  I* nodes;
  I* trees;
  uint32_t* places;
  int64_t num_nodes;

  explicit Nodes(const SampleNodes& type)
      : time(type.node_time),
        nodes(static_cast<I*>(type.nodes)),
        trees(static_cast<I*>(type.trees)),
        places(static_cast<uint32_t*>(type.places)),
        num_nodes(type.num_nodes) {}

  __device__ __forceinline__ bool has(I node) const { return node >= 0 && static_cast<int64_t>(node) < num_nodes; }
  __device__ __forceinline__ uint64_t number_of(I node, I tree) const {
    return static_cast<uint64_t>(tree) * static_cast<uint64_t>(num_nodes) + static_cast<uint64_t>(node);
  }
};

// SampleBatch as kernels see it.
struct State {
  unsigned long long* error;
  int64_t* counts;
  int64_t num_types, width;

  explicit State(const SampleBatch& batch)
      : error(reinterpret_cast<unsigned long long*>(batch.state)),
        counts(batch.state + 1),
        num_types(batch.num_types),
        width(2 * batch.num_types + batch.num_relations) {}

  // What there is before a step.
  __device__ __forceinline__ int64_t& nodes(int64_t step, int64_t type) const { return counts[step * width + type]; }
  __device__ __forceinline__ int64_t& edges_from(int64_t step, int64_t type) const {
    return counts[step * width + num_types + type];
  }
  __device__ __forceinline__ int64_t& edges(int64_t step, int64_t relation) const {
    return counts[step * width + 2 * num_types + relation];
  }
  // The least of all wrongs is told.
  __device__ __forceinline__ void refuse(SampleError what, int64_t which, int64_t at) const {
    const uint64_t where = static_cast<uint64_t>(at) & ((uint64_t{1} << 40) - 1);
    atomicMin(error,
              static_cast<unsigned long long>(what) << 56 | static_cast<unsigned long long>(which) << 40 | where);
  }
};

// A step as kernels see it.
template <typename I>
struct Step {
  const I* indptr;
  const I* indices;
  const int64_t* edge_time;
  const int64_t* seed_time;
  Nodes<I> source, target;
  I* rows;
  I* cols;
  I* edges;
  State state;
  int64_t num_rows, nnz, relation, source_type, target_type;
  int64_t number, begin, end, max_rows, max_edges, fanout;
  int64_t* offsets;
  int64_t* firsts;
  int64_t* sizes;
  bool replace, last, timed;

  Step(const Csr& graph, const SampleNodes& from, const SampleNodes& to, const SampleEdges& edge,
       const SampleBatch& batch, const SampleStep& step)
      : indptr(static_cast<const I*>(graph.indptr)),
        indices(static_cast<const I*>(graph.indices)),
        edge_time(edge.edge_time),
        seed_time(batch.seed_time),
        source(from),
        target(to),
        rows(static_cast<I*>(edge.rows)),
        cols(static_cast<I*>(edge.cols)),
        edges(static_cast<I*>(edge.edges)),
        state(batch),
        num_rows(graph.num_rows),
        nnz(graph.nnz),
        relation(edge.number),
        source_type(edge.source),
        target_type(edge.target),
        number(step.number),
        begin(step.begin),
        end(step.end),
        max_rows(step.max_rows),
        max_edges(step.max_edges),
        fanout(step.fanout),
        offsets(step.rows),
        firsts(step.rows + step.max_rows + 1),
        sizes(firsts + step.max_rows),
        replace(step.replace),
        last(step.last),
        timed(batch.seed_time && (edge.edge_time || from.node_time)) {}

  __device__ __forceinline__ int64_t first_row() const { return begin < 0 ? 0 : state.nodes(begin, target_type); }
  __device__ __forceinline__ int64_t row_count() const { return state.nodes(end, target_type) - first_row(); }
  __device__ __forceinline__ int64_t first_edge() const { return state.edges(number, relation); }
  __device__ __forceinline__ int64_t first_key() const { return state.edges_from(number, source_type); }
  // Never above what there is room for, whatever indptr says by now.
  __device__ __forceinline__ int64_t num_edges() const {
    return offsets[max_rows] < max_edges ? offsets[max_rows] : max_edges;
  }
  __device__ __forceinline__ void refuse(SampleError what, int64_t at) const { state.refuse(what, relation, at); }
  __device__ __forceinline__ I tree_of(int64_t place) const { return target.trees ? target.trees[place] : I{0}; }

  // Time of the edge at place k; of one from a node that there is not, the latest.
  __device__ __forceinline__ int64_t time_of(int64_t k) const {
    if (edge_time) return edge_time[k];
    const I node = indices[k];
    if (source.has(node)) return source.time[node];
    refuse(SampleError::indices, k);
    return INT64_MAX;
  }

  // Edge number `at` of the step is the one at place k, into row i. Its row is the source's number for now, -1 if that
  // is wrong.
  template <typename Table>
  __device__ __forceinline__ void put(const Table& table, int64_t at, int64_t i, int64_t k) const {
    if (at >= max_edges) return refuse(SampleError::changed, 0);
    const int64_t edge = first_edge() + at, place = first_row() + i;
    if (k < 0 || k >= nnz) {
      rows[edge] = static_cast<I>(-1);
      return refuse(SampleError::changed, 0);
    }
    edges[edge] = static_cast<I>(k);
    cols[edge] = static_cast<I>(place);
    const I node = indices[k];
    const bool known = source.has(node);
    rows[edge] = known ? node : static_cast<I>(-1);
    if (!known) return refuse(SampleError::indices, k);
    const I tree = tree_of(place);
    table.enter(source.number_of(node, tree), static_cast<uint32_t>(first_key() + at));
    if (timed && time_of(k) > seed_time[tree]) refuse(SampleError::time, k);
  }
};

// A row of a step, and where its edges go among those of the step.
struct Row {
  int64_t first = 0, size = 0, at = 0, count = 0;
  uint64_t seed = 0;

  template <typename I>
  __device__ __forceinline__ Row(const Step<I>& given, int64_t i, uint64_t relation_seed) {
    if (i >= given.max_rows) return;
    at = given.offsets[i];
    count = given.offsets[i + 1] - at;
    if (count == 0) return;
    first = given.firsts[i];
    size = given.sizes[i];
    seed = splitmix64(relation_seed, static_cast<uint64_t>(given.first_row() + i));
  }
};

// Of rows with weights (sampling_weighted.cu): brings the number of edges of each down to how many of a weight above 0
// there are, and lists those that are long; then places in indices in step.edges, -1 for those that there are not.
template <typename I>
cudaError_t count_weighted(const Step<I>& given, const SampleEdges& edges, cudaStream_t stream);
template <typename I>
cudaError_t draw_weighted(const Step<I>& given, const SampleEdges& edges, uint64_t relation_seed, cudaStream_t stream);

}  // namespace sample_impl
}  // namespace cuda
}  // namespace gnnaccel
