// Neighbour sampling, hop by hop: the CPU's samples bit for bit (cpp/sampling.cpp), whose random numbers can be
// computed in any order. Three steps, of which none needs the host:
//   1. sample_degrees: how many edges each destination will have, and by a scan where they go;
//   2. sample_edges: which edges. A group of lanes takes a row, as wide as the fan-out; a warp where that is above 32;
//      a thread takes an edge where all are taken. Each source is entered in a table with the place of its edge;
//   3. and the sources' places: an edge that has its source's least place adds a node, a scan tells which.
// Numbers of rows and edges are on the device: kernels are launched for as many as there may be.
#include <cub/device/device_scan.cuh>

#include "sampling.cuh"
#include "sort.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

using namespace sample_impl;
using sort_impl::blocks_for;
using sort_impl::kThreads;

// A hop of a batch as kernels see it.
template <typename I>
struct Hop {
  const I* indptr;
  const I* indices;
  int64_t num_nodes, nnz;
  I* nodes;
  I* rows;
  I* cols;
  I* edges;
  uint32_t* places;
  unsigned long long* error;
  int64_t* nodes_after;  // [hops + 1]: nodes there are before the first hop, after it, and so on
  int64_t* edges_after;
  int64_t num_seeds, max_rows, max_edges, hop;
  bool resample;

  Hop(const Csr& graph, const SampleBatch& batch, int64_t hop, int64_t max_rows, int64_t max_edges)
      : indptr(static_cast<const I*>(graph.indptr)),
        indices(static_cast<const I*>(graph.indices)),
        num_nodes(graph.num_rows),
        nnz(graph.nnz),
        nodes(static_cast<I*>(batch.nodes)),
        rows(static_cast<I*>(batch.rows)),
        cols(static_cast<I*>(batch.cols)),
        edges(static_cast<I*>(batch.edges)),
        places(static_cast<uint32_t*>(batch.places)),
        error(static_cast<unsigned long long*>(batch.state)),
        nodes_after(static_cast<int64_t*>(batch.state) + 1),
        edges_after(static_cast<int64_t*>(batch.state) + 2 + batch.num_hops),
        num_seeds(batch.num_seeds),
        max_rows(max_rows),
        max_edges(max_edges),
        hop(hop),
        resample(batch.resample) {}

  __device__ __forceinline__ int64_t first_row() const { return hop && !resample ? nodes_after[hop - 1] : 0; }
  __device__ __forceinline__ int64_t num_rows() const { return nodes_after[hop] - first_row(); }
  __device__ __forceinline__ int64_t first_edge() const { return edges_after[hop]; }
  // Never above what there is room for, whatever indptr says by now.
  __device__ __forceinline__ int64_t num_edges(const int64_t* offsets) const {
    return offsets[max_rows] < max_edges ? offsets[max_rows] : max_edges;
  }
  // The least of all wrongs is told.
  __device__ __forceinline__ void refuse(SampleError what, int64_t at) const {
    atomicMin(error, static_cast<unsigned long long>(what) << 56 | static_cast<unsigned long long>(at));
  }

  // Edge number `at` of the hop is nonzero k, into row i. Its row is the source's number for now, -1 if that is wrong.
  template <typename Table>
  __device__ __forceinline__ void put(const Table& table, int64_t at, int64_t i, int64_t k) const {
    if (at >= max_edges) return refuse(SampleError::changed, 0);
    const int64_t edge = first_edge() + at;
    if (k < 0 || k >= nnz) {
      rows[edge] = static_cast<I>(-1);
      return refuse(SampleError::changed, 0);
    }
    edges[edge] = static_cast<I>(k);
    cols[edge] = static_cast<I>(first_row() + i);
    const I source = indices[k];
    const bool known = source >= 0 && static_cast<int64_t>(source) < num_nodes;
    rows[edge] = known ? source : static_cast<I>(-1);
    if (known) {
      table.enter(source, static_cast<uint32_t>(num_seeds + edge));
    } else {
      refuse(SampleError::indices, k);
    }
  }
};

// The row of a destination, and where its edges go among those of the hop.
template <typename I>
struct Row {
  int64_t first = 0, size = 0, at = 0, count = 0;
  uint64_t seed = 0;

  __device__ __forceinline__ Row(const Hop<I>& given, const int64_t* offsets, int64_t i, uint64_t batch_seed) {
    if (i >= given.num_rows()) return;
    at = offsets[i];
    count = offsets[i + 1] - at;
    if (count == 0) return;
    const int64_t place = given.first_row() + i;
    const I node = given.nodes[place];
    first = given.indptr[node];
    size = given.indptr[node + 1] - first;
    seed = splitmix64(batch_seed, static_cast<uint64_t>(place));
  }
};

template <typename I, typename Table>
__global__ void __launch_bounds__(kThreads) seeds_kernel(Hop<I> given, Table table, const I* seeds) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i == 0) {
    given.nodes_after[0] = given.num_seeds;
    given.edges_after[0] = 0;
  }
  if (i >= given.num_seeds) return;
  const I seed = seeds[i];
  const bool known = seed >= 0 && static_cast<int64_t>(seed) < given.num_nodes;
  given.nodes[i] = known ? seed : static_cast<I>(-1);
  given.places[i] = static_cast<uint32_t>(i);
  if (known) {
    table.enter(seed, static_cast<uint32_t>(i));
  } else {
    given.refuse(SampleError::seeds, i);
  }
}

// offsets[i]: how many edges row i will have.
template <typename I>
__global__ void __launch_bounds__(kThreads)
    degrees_kernel(Hop<I> given, int64_t fanout, bool replace, int64_t* offsets) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i > given.max_rows) return;
  int64_t count = 0;
  const I node = i < given.max_rows && i < given.num_rows() ? given.nodes[given.first_row() + i] : static_cast<I>(-1);
  if (node >= 0) {
    const int64_t first = given.indptr[node], end = given.indptr[node + 1];
    if (first < 0 || end < first || end > given.nnz) {
      given.refuse(SampleError::indptr, node);
    } else {
      count = end - first;
      if (fanout >= 0 && count > 0) count = replace || count > fanout ? fanout : count;
    }
  }
  offsets[i] = count;
}

// Fan-outs up to L, a row to each group of L lanes.
template <int L, typename I, typename Table>
__global__ void __launch_bounds__(kThreads)
    groups_kernel(Hop<I> given, Table table, const int64_t* offsets, bool replace, uint64_t seed) {
  const int lane = threadIdx.x % L;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / L;
  const Row<I> row(given, offsets, i, seed);
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
__global__ void __launch_bounds__(kThreads)
    warps_kernel(Hop<I> given, Table table, const int64_t* offsets, bool replace, uint64_t seed, uint32_t* hash) {
  const int lane = threadIdx.x % 32;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const Row<I> row(given, offsets, i, seed);
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

// Every neighbour: an edge to each thread.
template <typename I, typename Table>
__global__ void __launch_bounds__(kThreads) all_kernel(Hop<I> given, Table table, const int64_t* offsets) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= given.num_edges(offsets)) {
    if (at == given.max_edges && offsets[given.max_rows] > at) given.refuse(SampleError::changed, 0);
    return;
  }
  const int64_t i = find_row(offsets, given.max_rows, at);
  given.put(table, at, i, given.indptr[given.nodes[given.first_row() + i]] + (at - offsets[i]));
}

// news[e]: whether edge e of the hop is the first from its source.
template <typename I, typename Table>
__global__ void __launch_bounds__(kThreads)
    news_kernel(Hop<I> given, Table table, const int64_t* offsets, uint32_t* news) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (e > given.max_edges) return;
  bool is_new = false;
  if (e < given.num_edges(offsets)) {
    const int64_t edge = given.first_edge() + e;
    const I source = given.rows[edge];
    is_new = source >= 0 && table.find(source) == static_cast<uint32_t>(given.num_seeds + edge);
  }
  news[e] = is_new;
}

// Places in place of the sources' numbers, from how many nodes are new before each edge.
template <typename I, typename Table>
__global__ void __launch_bounds__(kThreads)
    places_kernel(Hop<I> given, Table table, const int64_t* offsets, const uint32_t* news) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t num_edges = given.num_edges(offsets), num_nodes = given.nodes_after[given.hop];
  if (e == 0) {
    given.nodes_after[given.hop + 1] = num_nodes + news[given.max_edges];
    given.edges_after[given.hop + 1] = given.first_edge() + num_edges;
  }
  if (e >= num_edges) return;
  const int64_t edge = given.first_edge() + e, first_key = given.num_seeds + given.first_edge();
  const I source = given.rows[edge];
  if (source < 0) {
    given.rows[edge] = 0;
    return;
  }
  const uint32_t key = table.find(source);
  const int64_t place = key < first_key ? given.places[key] : num_nodes + news[key - first_key];
  given.rows[edge] = static_cast<I>(place);
  if (key != static_cast<uint32_t>(given.num_seeds + edge)) return;
  given.nodes[place] = source;
  given.places[key] = static_cast<uint32_t>(place);
}

// Calls f(Hop, table) in the graph's types.
template <typename F>
cudaError_t with_hop(const Csr& graph, const SampleBatch& batch, int64_t hop, int64_t max_rows, int64_t max_edges,
                     F f) {
  return with_index(graph.index_type, [&](auto index) {
    using I = decltype(index);
    const Hop<I> given(graph, batch, hop, max_rows, max_edges);
    return batch.slots ? f(given, Slots<I>(batch.table, batch.slots)) : f(given, Cells<I>(batch.table, 0));
  });
}

template <typename I, typename Table>
void draw_edges(const Hop<I>& given, const Table& table, const int64_t* offsets, int64_t fanout, bool replace,
                uint64_t seed, uint32_t* hash, cudaStream_t stream) {
  const auto by_group = [&](auto kernel, int64_t lanes) {
    kernel<<<blocks_for(given.max_rows * lanes), kThreads, 0, stream>>>(given, table, offsets, replace, seed);
  };
  if (fanout < 0) {
    all_kernel<I, Table><<<blocks_for(given.max_edges + 1), kThreads, 0, stream>>>(given, table, offsets);
  } else if (fanout <= 4) {
    by_group(groups_kernel<4, I, Table>, 4);
  } else if (fanout <= 8) {
    by_group(groups_kernel<8, I, Table>, 8);
  } else if (fanout <= 16) {
    by_group(groups_kernel<16, I, Table>, 16);
  } else if (fanout <= 32) {
    by_group(groups_kernel<32, I, Table>, 32);
  } else {
    warps_kernel<I, Table>
        <<<blocks_for(given.max_rows * 32), kThreads, 0, stream>>>(given, table, offsets, replace, seed, hash);
  }
}

}  // namespace

cudaError_t sample_seeds(const Csr& graph, const void* seeds, const SampleBatch& batch, cudaStream_t stream) {
  const int64_t index_bytes = graph.index_type == IndexType::i32 ? 4 : 8;
  const int64_t bytes = batch.slots ? batch.slots * (index_bytes + 4) : graph.num_rows * 4;
  cudaError_t status = cudaMemsetAsync(batch.state, 0xFF, sizeof(int64_t), stream);
  if (status == cudaSuccess && bytes) status = cudaMemsetAsync(batch.table, 0xFF, static_cast<size_t>(bytes), stream);
  if (status != cudaSuccess) return status;
  return with_hop(graph, batch, 0, 0, 0, [&](auto given, auto table) {
    seeds_kernel<<<blocks_for(batch.num_seeds + 1), kThreads, 0, stream>>>(given, table,
                                                                           static_cast<decltype(given.indptr)>(seeds));
    return cudaGetLastError();
  });
}

cudaError_t sample_degrees(Workspace& workspace, const Csr& graph, const SampleBatch& batch, int64_t hop,
                           int64_t max_rows, int64_t fanout, bool replace, int64_t* offsets, cudaStream_t stream) {
  size_t bytes = 0;
  cub::DeviceScan::ExclusiveSum(nullptr, bytes, static_cast<const int64_t*>(nullptr), static_cast<int64_t*>(nullptr),
                                max_rows + 1);
  void* const storage = workspace.take(static_cast<int64_t>(bytes));
  return with_index(graph.index_type, [&](auto index) {
    using I = decltype(index);
    degrees_kernel<I><<<blocks_for(max_rows + 1), kThreads, 0, stream>>>(Hop<I>(graph, batch, hop, max_rows, 0), fanout,
                                                                         replace, offsets);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) return status;
    return cub::DeviceScan::ExclusiveSum(storage, bytes, static_cast<const int64_t*>(offsets), offsets, max_rows + 1,
                                         stream);
  });
}

cudaError_t sample_edges(Workspace& workspace, const Csr& graph, const SampleBatch& batch, int64_t hop,
                         int64_t max_rows, int64_t max_edges, int64_t fanout, bool replace, uint64_t seed,
                         const int64_t* offsets, cudaStream_t stream) {
  size_t bytes = 0;
  cub::DeviceScan::ExclusiveSum(nullptr, bytes, static_cast<const uint32_t*>(nullptr), static_cast<uint32_t*>(nullptr),
                                max_edges + 1);
  const int64_t hashed = fanout > 32 && !replace ? 2 * max_edges : 0;
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
  const uint64_t batch_seed = splitmix64(seed, 0);  // the CPU has one for each relation; this is the first
  return with_hop(graph, batch, hop, max_rows, max_edges, [&](auto given, auto table) {
    if (max_edges) draw_edges(given, table, offsets, fanout, replace, batch_seed, hash, stream);
    news_kernel<<<blocks_for(max_edges + 1), kThreads, 0, stream>>>(given, table, offsets, news);
    cudaError_t status = cudaGetLastError();
    if (status == cudaSuccess)
      status = cub::DeviceScan::ExclusiveSum(storage, bytes, static_cast<const uint32_t*>(news), news, max_edges + 1,
                                             stream);
    if (status != cudaSuccess) return status;
    places_kernel<<<blocks_for(max_edges + 1), kThreads, 0, stream>>>(given, table, offsets, news);
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace gnnaccel
