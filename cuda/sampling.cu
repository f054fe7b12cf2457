// Neighbour sampling, hop by hop and relation by relation. Without weights: the CPU's samples bit for bit
// (cpp/sampling.cpp), whose random numbers can be computed in any order. Three stages of a step, of which none needs
// the host:
//   1. sample_degrees: which edges of each destination may be drawn, of a time early enough, how many will be, and by a
//      scan where they go;
//   2. sample_edges: which edges. A group of lanes takes a row, as wide as the fan-out; a warp where that is above 32;
//      a thread takes an edge where all are taken, or were drawn by weight (sampling_weighted.cu). Each source is
//      entered in a table with the place of its edge;
//   3. and the sources' places: an edge that has its source's least place adds a node, a scan tells which.
// Numbers of rows and edges are on the device: kernels are launched for as many as there may be.
#include <algorithm>
#include <cub/device/device_scan.cuh>
#include <vector>

#include "sampling.cuh"
#include "sort.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

using namespace sample_impl;
using sort_impl::blocks_for;
using sort_impl::kThreads;

// Nodes of a type that are in a batch already, the seeds first of all: a node's key is its place.
template <typename I, typename Table>
__global__ void __launch_bounds__(kThreads)
    enter_kernel(Nodes<I> type, State state, Table table, int64_t which, int64_t step, int64_t most) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= most || i >= state.nodes(step, which)) return;
  const I node = type.nodes[i];
  type.places[i] = static_cast<uint32_t>(i);
  if (type.has(node)) table.enter(type.number_of(node, type.trees ? type.trees[i] : I{0}), static_cast<uint32_t>(i));
}

// And before that the seeds become nodes, -1 if there is no such.
template <typename I>
__global__ void __launch_bounds__(kThreads)
    seeds_kernel(Nodes<I> type, State state, const I* seeds, int64_t num_seeds, int64_t first_seed, int64_t which) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i == 0) state.nodes(0, which) = state.edges_from(0, which) = num_seeds;
  if (which == 0)
    for (int64_t relation = i; 2 * state.num_types + relation < state.width; relation += gridDim.x * kThreads)
      state.edges(0, relation) = 0;
  if (i >= num_seeds) return;
  const bool known = type.has(seeds[i]);
  type.nodes[i] = known ? seeds[i] : static_cast<I>(-1);
  if (type.trees) type.trees[i] = static_cast<I>(first_seed + i);
  if (!known) state.refuse(SampleError::seeds, which, i);
}

// The first of places first .. end - 1 with a time above `time`, which ascend.
template <typename I>
__device__ int64_t early_enough(const Step<I>& given, int64_t first, int64_t end, int64_t time) {
  while (first < end) {
    const int64_t middle = first + (end - first) / 2;
    if (given.time_of(middle) <= time) {
      first = middle + 1;
    } else {
      end = middle;
    }
  }
  return first;
}

// What may be drawn of row i; offsets[i]: how many edges it will have.
template <typename I>
__global__ void __launch_bounds__(kThreads) degrees_kernel(Step<I> given) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i > given.max_rows) return;
  given.offsets[i] = 0;
  if (i == given.max_rows || i >= given.row_count()) return;
  const int64_t place = given.first_row() + i;
  const I node = given.target.nodes[place];
  if (node < 0) return;
  if (static_cast<int64_t>(node) >= given.num_rows) return given.refuse(SampleError::no_row, node);
  int64_t first = given.indptr[node], end = given.indptr[node + 1];
  if (first < 0 || end < first || end > given.nnz) return given.refuse(SampleError::indptr, node);
  if (given.timed && first < end) {
    end = early_enough(given, first, end, given.seed_time[given.target.trees[place]]);
    if (given.last && given.fanout >= 0 && end - first > given.fanout) first = end - given.fanout;
  }
  const int64_t size = end - first;
  given.firsts[i] = first;
  given.sizes[i] = size;
  const bool all = given.fanout < 0 || size == 0 || (!given.replace && size <= given.fanout);
  given.offsets[i] = all ? size : given.fanout;
}

// Fan-outs up to L, a row to each group of L lanes.
template <int L, typename I, typename Table>
__global__ void __launch_bounds__(kThreads) groups_kernel(Step<I> given, Table table, uint64_t seed) {
  const int lane = threadIdx.x % L;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / L;
  const Row row(given, i, seed);
  const bool replace = given.replace;
  const int64_t base = row.size - row.count;
  const bool active = lane < row.count, draws = active && (replace || base > 0);
  uint64_t passed = 0;
  uint64_t value = draw<L>(draws, static_cast<uint64_t>(replace ? row.size : base + lane + 1), row.seed,
                           static_cast<uint64_t>(lane), passed);
  if (!replace) {
    const unsigned same = __match_any_sync(~0u, static_cast<unsigned long long>(value));
    const unsigned others = __ballot_sync(~0u, draws) & ((1u << threadIdx.x % 32) - 1);
    const unsigned group = L == 32 ? ~0u : ((1u << L % 32) - 1) << (threadIdx.x % 32 / L * L);
    const int64_t next = static_cast<int64_t>(value) - base;
    const bool replaced = draws && (same & others & group) != 0;
    if (follow<L>(replaced, draws && next >= 0 && next < lane ? static_cast<int>(next) : -1))
      value = static_cast<uint64_t>(base + lane);
  }
  if (active) given.put(table, row.at + lane, i, row.first + (draws ? static_cast<int64_t>(value) : lane));
}

// The place of number n among the `slots` of a row's hash table.
__device__ __forceinline__ uint32_t slot_of(int64_t n, uint32_t slots) {
  return static_cast<uint32_t>((splitmix64(0, static_cast<uint64_t>(n)) >> 32) * slots >> 32);
}

// Any fan-out, a row to each warp. Which draws are repeats a hash table of the row tells: of each number drawn it has
// the first that drew it. hash [2 * max_edges], all kNone at first; null: none is needed.
template <typename I, typename Table>
__global__ void __launch_bounds__(kThreads) warps_kernel(Step<I> given, Table table, uint64_t seed, uint32_t* hash) {
  const int lane = threadIdx.x % 32;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const Row row(given, i, seed);
  const bool replace = given.replace;
  const int64_t base = row.size - row.count;
  if (row.at + row.count > given.max_edges) {
    for (int64_t at = row.at + lane; at < given.max_edges; at += 32) given.rows[given.first_edge() + at] = -1;
    given.refuse(SampleError::changed, 0);
    return;
  }
  if (replace || base <= 0) {
    uint64_t passed = 0;
    for (int64_t t = lane; t - lane < row.count; t += 32) {
      const uint64_t value = draw<32>(replace && t < row.count, static_cast<uint64_t>(row.size), row.seed,
                                      static_cast<uint64_t>(t), passed);
      if (t < row.count) given.put(table, row.at + t, i, row.first + (replace ? static_cast<int64_t>(value) : t));
    }
    return;
  }
  I* const drawn = given.edges + given.first_edge() + row.at;  // numbers in the row, until put() has the last word
  uint64_t passed = 0;
  for (int64_t t = lane; t - lane < row.count; t += 32) {
    const uint64_t value =
        draw<32>(t < row.count, static_cast<uint64_t>(base + t + 1), row.seed, static_cast<uint64_t>(t), passed);
    if (t < row.count) drawn[t] = static_cast<I>(value);
  }
  __syncwarp();
  uint32_t* const first_of = hash + 2 * row.at;
  const auto slots = static_cast<uint32_t>(2 * row.count);
  for (int64_t t = lane; t < row.count; t += 32) {
    for (uint32_t at = slot_of(drawn[t], slots);; at = at + 1 == slots ? 0 : at + 1) {
      const uint32_t there = atomicCAS(first_of + at, kNone, static_cast<uint32_t>(t));
      if (there != kNone && drawn[there] != drawn[t]) continue;
      atomicMin(first_of + at, static_cast<uint32_t>(t));
      break;
    }
  }
  __syncwarp();
  // Repeats are marked by ~; the table names none of them.
  for (int64_t t = lane; t < row.count; t += 32) {
    uint32_t at = slot_of(drawn[t], slots);
    while (drawn[first_of[at]] != drawn[t]) at = at + 1 == slots ? 0 : at + 1;
    if (first_of[at] < t) drawn[t] = ~drawn[t];
  }
  __syncwarp();
  for (int64_t start = 0; start < row.count; start += 32) {
    const int64_t t = start + lane;
    const bool active = t < row.count;
    int64_t value = active ? static_cast<int64_t>(drawn[t]) : -1;
    bool replaced = value < 0;
    if (replaced) value = ~value;
    const int64_t next = value - base;
    if (active && next >= 0 && next < start)  // one of an earlier round, in its final form
      replaced = replaced || static_cast<int64_t>(drawn[next]) == row.first + value;
    const bool near = active && next >= start && next < t;
    if (follow<32>(replaced, near ? static_cast<int>(next - start) : -1)) value = base + t;
    if (active) given.put(table, row.at + t, i, row.first + value);
    __syncwarp();
  }
}

// Every neighbour, or those that were drawn by weight: an edge to each thread.
template <typename I, typename Table>
__global__ void __launch_bounds__(kThreads) edges_kernel(Step<I> given, Table table, bool drawn) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= given.num_edges()) {
    if (at == given.max_edges && given.offsets[given.max_rows] > at) given.refuse(SampleError::changed, 0);
    return;
  }
  const int64_t i = find_row(given.offsets, given.max_rows, at);
  const int64_t k =
      drawn ? static_cast<int64_t>(given.edges[given.first_edge() + at]) : given.firsts[i] + (at - given.offsets[i]);
  given.put(table, at, i, k);
}

// news[e]: whether edge e of the step is the first from its source.
template <typename I, typename Table>
__global__ void __launch_bounds__(kThreads) news_kernel(Step<I> given, Table table, uint32_t* news) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (e > given.max_edges) return;
  bool is_new = false;
  if (e < given.num_edges()) {
    const int64_t edge = given.first_edge() + e;
    const I node = given.rows[edge];
    is_new = node >= 0 && table.find(given.source.number_of(node, given.tree_of(given.cols[edge]))) ==
                              static_cast<uint32_t>(given.first_key() + e);
  }
  news[e] = is_new;
}

// Places in place of the sources' numbers, from how many nodes are new before each edge; and what there is after the
// step.
template <typename I, typename Table>
__global__ void __launch_bounds__(kThreads) places_kernel(Step<I> given, Table table, const uint32_t* news) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t num_edges = given.num_edges(), num_nodes = given.state.nodes(given.number, given.source_type);
  const State& state = given.state;
  for (int64_t count = e; count < state.width; count += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t* const before = state.counts + given.number * state.width + count;
    int64_t more = 0;
    if (count == given.source_type) more = news[given.max_edges];
    if (count == state.num_types + given.source_type || count == 2 * state.num_types + given.relation) more = num_edges;
    state.counts[(given.number + 1) * state.width + count] = *before + more;
  }
  if (e >= num_edges) return;
  const int64_t edge = given.first_edge() + e, first_key = given.first_key();
  const I node = given.rows[edge];
  if (node < 0) {
    given.rows[edge] = 0;
    return;
  }
  const I tree = given.tree_of(given.cols[edge]);
  const uint32_t key = table.find(given.source.number_of(node, tree));
  const int64_t place = key < first_key ? given.source.places[key] : num_nodes + news[key - first_key];
  given.rows[edge] = static_cast<I>(place);
  if (key != static_cast<uint32_t>(first_key + e)) return;
  given.source.nodes[place] = node;
  if (given.source.trees) given.source.trees[place] = tree;
  given.source.places[key] = static_cast<uint32_t>(place);
}

// Calls f(table) with that of a type, whose numbers are of 32 bits where nodes are, unless there are trees.
template <typename I, typename F>
cudaError_t with_table(const SampleNodes& type, F f) {
  if (!type.slots) return f(Cells(type.table, 0));
  if constexpr (sizeof(I) == 4)
    if (!type.trees) return f(Slots<unsigned>(type.table, type.slots));
  return f(Slots<unsigned long long>(type.table, type.slots));
}

cudaError_t clear_table(const SampleNodes& type, IndexType index_type, cudaStream_t stream) {
  const int64_t number_bytes = index_type == IndexType::i32 && !type.trees ? 4 : 8;
  const int64_t bytes = type.slots ? type.slots * (number_bytes + 4) : type.num_nodes * 4;
  return bytes ? cudaMemsetAsync(type.table, 0xFF, static_cast<size_t>(bytes), stream) : cudaSuccess;
}

template <typename I>
cudaError_t enter_nodes(const SampleNodes& type, int64_t number, const SampleBatch& batch, int64_t step, int64_t most,
                        cudaStream_t stream) {
  if (most == 0) return cudaSuccess;
  return with_table<I>(type, [&](auto table) {
    enter_kernel<<<blocks_for(most), kThreads, 0, stream>>>(Nodes<I>(type), State(batch), table, number, step, most);
    return cudaGetLastError();
  });
}

template <typename I, typename Table>
void draw_edges(const Step<I>& given, const Table& table, bool drawn, uint64_t seed, uint32_t* hash,
                cudaStream_t stream) {
  const auto by_group = [&](auto kernel, int64_t lanes) {
    kernel<<<blocks_for(given.max_rows * lanes), kThreads, 0, stream>>>(given, table, seed);
  };
  if (given.fanout < 0 || drawn) {
    edges_kernel<I, Table><<<blocks_for(given.max_edges + 1), kThreads, 0, stream>>>(given, table, drawn);
  } else if (given.fanout <= 4) {
    by_group(groups_kernel<4, I, Table>, 4);
  } else if (given.fanout <= 8) {
    by_group(groups_kernel<8, I, Table>, 8);
  } else if (given.fanout <= 16) {
    by_group(groups_kernel<16, I, Table>, 16);
  } else if (given.fanout <= 32) {
    by_group(groups_kernel<32, I, Table>, 32);
  } else {
    warps_kernel<I, Table><<<blocks_for(given.max_rows * 32), kThreads, 0, stream>>>(given, table, seed, hash);
  }
}

// Memory that calls on one stream take one after the other; more than there is comes from where that came from.
class Reused final : public Workspace {
 public:
  Reused(Workspace& from, int64_t bytes) : from_(from), bytes_(bytes), block_(from.take(bytes)) {}
  void* take(int64_t bytes) override { return bytes <= bytes_ ? block_ : from_.take(bytes); }

 private:
  Workspace& from_;
  int64_t bytes_;
  void* block_;
};

// True if a row has edges that are drawn by weight.
bool is_weighted(const SampleEdges& edges, const SampleStep& step) { return edges.weight && step.fanout >= 0; }

}  // namespace

cudaError_t sample_seeds(const SampleNodes& type, int64_t number, const SampleBatch& batch, cudaStream_t stream) {
  cudaError_t status = number ? cudaSuccess : cudaMemsetAsync(batch.state, 0xFF, sizeof(int64_t), stream);
  if (status == cudaSuccess) status = clear_table(type, batch.index_type, stream);
  if (status != cudaSuccess) return status;
  return with_index(batch.index_type, [&](auto index) {
    using I = decltype(index);
    seeds_kernel<<<blocks_for(type.num_seeds + 1), kThreads, 0, stream>>>(
        Nodes<I>(type), State(batch), static_cast<const I*>(type.seeds), type.num_seeds, type.first_seed, number);
    const cudaError_t launched = cudaGetLastError();
    return launched == cudaSuccess ? enter_nodes<I>(type, number, batch, 0, type.num_seeds, stream) : launched;
  });
}

cudaError_t sample_table(const SampleNodes& type, int64_t number, const SampleBatch& batch, int64_t step,
                         cudaStream_t stream) {
  const cudaError_t status = clear_table(type, batch.index_type, stream);
  if (status != cudaSuccess) return status;
  return with_index(batch.index_type, [&](auto index) {
    return enter_nodes<decltype(index)>(type, number, batch, step, type.slots / 2, stream);
  });
}

cudaError_t sample_degrees(Workspace& workspace, const Csr& graph, const SampleNodes& source, const SampleNodes& target,
                           const SampleEdges& edges, const SampleBatch& batch, const SampleStep& step,
                           cudaStream_t stream) {
  size_t bytes = 0;
  cub::DeviceScan::ExclusiveSum(nullptr, bytes, static_cast<const int64_t*>(nullptr), static_cast<int64_t*>(nullptr),
                                step.max_rows + 1);
  void* const storage = workspace.take(static_cast<int64_t>(bytes));
  return with_index(graph.index_type, [&](auto index) {
    using I = decltype(index);
    const Step<I> given(graph, source, target, edges, batch, step);
    degrees_kernel<I><<<blocks_for(step.max_rows + 1), kThreads, 0, stream>>>(given);
    cudaError_t status = cudaGetLastError();
    if (status == cudaSuccess && is_weighted(edges, step)) status = count_weighted(given, edges, stream);
    if (status != cudaSuccess) return status;
    return cub::DeviceScan::ExclusiveSum(storage, bytes, static_cast<const int64_t*>(given.offsets), given.offsets,
                                         step.max_rows + 1, stream);
  });
}

cudaError_t sample_edges(Workspace& workspace, const Csr& graph, const SampleNodes& source, const SampleNodes& target,
                         const SampleEdges& edges, const SampleBatch& batch, const SampleStep& step,
                         cudaStream_t stream) {
  const int64_t max_edges = step.max_edges;
  const bool drawn = is_weighted(edges, step);
  size_t bytes = 0;
  cub::DeviceScan::ExclusiveSum(nullptr, bytes, static_cast<const uint32_t*>(nullptr), static_cast<uint32_t*>(nullptr),
                                max_edges + 1);
  const int64_t hashed = step.fanout > 32 && !step.replace && !drawn ? 2 * max_edges : 0;
  const auto padded = [](int64_t size) { return sort_impl::padded(size); };
  sort_impl::Pieces pieces(
      workspace.take(padded(4 * (max_edges + 1)) + padded(4 * hashed) + static_cast<int64_t>(bytes)));
  auto* const news = pieces.take<uint32_t>(max_edges + 1);
  auto* const hash = pieces.take<uint32_t>(hashed);
  void* const storage = pieces.take<char>(static_cast<int64_t>(bytes));
  if (hashed) {
    const cudaError_t status = cudaMemsetAsync(hash, 0xFF, static_cast<size_t>(4 * hashed), stream);
    if (status != cudaSuccess) return status;
  }
  const uint64_t relation_seed = splitmix64(step.seed, static_cast<uint64_t>(edges.number));
  return with_index(graph.index_type, [&](auto index) {
    using I = decltype(index);
    const Step<I> given(graph, source, target, edges, batch, step);
    if (max_edges && drawn) {
      const cudaError_t status = draw_weighted(given, edges, relation_seed, stream);
      if (status != cudaSuccess) return status;
    }
    return with_table<I>(source, [&](auto table) {
      if (max_edges) draw_edges(given, table, drawn, relation_seed, hash, stream);
      news_kernel<<<blocks_for(max_edges + 1), kThreads, 0, stream>>>(given, table, news);
      cudaError_t status = cudaGetLastError();
      if (status == cudaSuccess)
        status = cub::DeviceScan::ExclusiveSum(storage, bytes, static_cast<const uint32_t*>(news), news, max_edges + 1,
                                               stream);
      if (status != cudaSuccess) return status;
      places_kernel<<<blocks_for(max_edges + 1), kThreads, 0, stream>>>(given, table, news);
      return cudaGetLastError();
    });
  });
}

cudaError_t sample_steps(Workspace& workspace, const std::vector<Csr>& graphs, const std::vector<SampleNodes>& types,
                         const std::vector<SampleEdges>& relations, const SampleBatch& batch,
                         const std::vector<SampleStep>& steps, const std::vector<int64_t>& relation_of,
                         cudaStream_t stream) {
  // What the largest step takes, which serves all: each is through with it on the stream when the next one begins.
  constexpr int64_t scan = 1 << 16;
  int64_t most = 0;
  for (const SampleStep& step : steps) most = std::max(most, sort_impl::padded(4 * (step.max_edges + 1)) + scan);
  Reused memory(workspace, most);
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto relation = static_cast<size_t>(relation_of.at(i));
    const SampleEdges& edges = relations.at(relation);
    const SampleNodes& source = types.at(static_cast<size_t>(edges.source));
    const SampleNodes& target = types.at(static_cast<size_t>(edges.target));
    for (auto* const stage : {&sample_degrees, &sample_edges}) {
      const cudaError_t status = stage(memory, graphs.at(relation), source, target, edges, batch, steps[i], stream);
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace gnnaccel
