// SpGEMM of MaxK-GNN: out[row] = sum over the row's nonzeros of weight * x[source], x compressed to k entries a row.
//
// A worker of eight lanes takes one row, or a piece of a long one (rows.cuh), and adds up into a dense row in shared
// memory (compressed.cuh): a lane reads its entries of a source, several sources in flight, and adds each to the
// feature it belongs to. Places of one source are distinct, so the lanes of a worker never meet in a feature, and no
// addition is atomic. A row has one writer; pieces go to a workspace and are added in order by a second kernel. The
// bits are the same on every run, nothing is zero-filled.
//
// Bytes: nnz * 5 k. Time: the entries' way through shared memory, twice 2.1 wavefronts an edge for k = 32 of 256, and
// of the 1.5 that they take to arrive. MaxK-GNN (Peng et al., 2024), whose kernel adds 256 features atomically for
// every group of edges.
#include "compressed.cuh"
#include "pieces.cuh"
#include "spmm.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

template <typename T, typename I>
struct Params {
  Rows<I> rows;
  const I* indices;
  const I* edge_ids;
  const T* values;
  const void* places;
  const T* weight;
  T* out;
  Acc<T>* parts;  // [num_parts, num_feats]
  Epilogue<T> epilogue;
  Columns columns;
  int k;
  int num_feats;
  bool fours;  // rows of out are whole fours of features, aligned

  __device__ __forceinline__ void write(int64_t row, int64_t feature, Acc<T> sum) const {
    out[row * num_feats + feature] = narrow<T>(epilogue(sum, row, feature));
  }
};

// Adds weight times N entries of one source to a worker's row.
template <int N, typename T, typename P>
__device__ __forceinline__ void add(const DenseRow<Acc<T>>& row, const Pack<T, N>& values, const Pack<P, N>& places,
                                    Acc<T> weight) {
  Acc<T> sum[N];  // all are read first: the compiler cannot know that places differ
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = row[places.values[i]];
#pragma unroll
  for (int i = 0; i < N; ++i) row[places.values[i]] = sum[i] + weight * widen(values.values[i]);
}

template <typename T, typename I, typename P, typename S, bool WEIGHTED>
__global__ void __launch_bounds__(kCompressedThreads, sizeof(T) <= 4 ? 4 : 2) spgemm_kernel(const Params<T, I> p) {
  using A = Acc<T>;
  constexpr int V = S::vector;
  extern __shared__ uint4 shared_rows[];
  const int lane = threadIdx.x % kLanes;
  const Span<I> span = span_of(p.rows, static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes);
  const I ahead = source_at(span, p.indices, span.begin);
  const DenseRow<A> row = dense_row_of<A>(shared_rows, p.columns);
  for (int r = 0; r < p.columns.height; ++r) row.at(lane, r) = 0;
  __syncwarp();
  const P* all_places = static_cast<const P*>(p.places);
  walk<S::batch, WEIGHTED>(span, ahead, p.indices, p.edge_ids, p.weight,
                           [&](auto full, int first, I col, A weight, I left) {
                             constexpr bool FULL = decltype(full)::value;
                             if constexpr (S::loads > 0) {
                               Pack<T, V> values[S::batch][S::loads];
                               Pack<P, V> places[S::batch][S::loads];
#pragma unroll
                               for (int u = 0; u < S::batch; ++u) {
                                 const I source = __shfl_sync(~0u, col, first + u, kLanes);
                                 if (!FULL && first + u >= left) continue;
#pragma unroll
                                 for (int i = 0; i < S::loads; ++i) {
                                   load(row_address(p.values, source, p.k) + lane * S::held + i * V, values[u][i]);
                                   load(row_address(all_places, source, p.k) + lane * S::held + i * V, places[u][i]);
                                 }
                               }
#pragma unroll
                               for (int u = 0; u < S::batch; ++u) {
                                 const A scale = WEIGHTED ? __shfl_sync(~0u, weight, first + u, kLanes) : A(1);
                                 if (FULL || first + u < left) {
#pragma unroll
                                   for (int i = 0; i < S::loads; ++i) add<V, T>(row, values[u][i], places[u][i], scale);
                                 }
                                 __syncwarp();  // the next source may have the same features
                               }
                             } else {
                               const I source = __shfl_sync(~0u, col, first, kLanes);
                               const A scale = WEIGHTED ? __shfl_sync(~0u, weight, first, kLanes) : A(1);
                               if (FULL || first < left) {
                                 const int own = (p.k + kLanes - 1) / kLanes;
                                 const int end = (lane + 1) * own < p.k ? (lane + 1) * own : p.k;
                                 for (int i = lane * own; i < end; i += V) {
                                   Pack<T, V> values;
                                   Pack<P, V> places;
                                   load(row_address(p.values, source, p.k) + i, values);
                                   load(row_address(all_places, source, p.k) + i, places);
                                   add<V, T>(row, values, places, scale);
                                 }
                               }
                               __syncwarp();
                             }
                           });
  if (!span.present) return;
  const int64_t part_at = span.part * p.num_feats, row_at = static_cast<int64_t>(span.row) * p.num_feats;
  if (p.fours) {
    for_fours(p.columns, p.num_feats, [&](int feature, int column, int r) {
      if (span.part >= 0) {
        constexpr int n = 16 / sizeof(A);
        Pack<A, n> part;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          part.values[e % n] = row.at(column, r + e);
          if (e % n == n - 1) store(p.parts + part_at + feature + e - (n - 1), part);
        }
        return;
      }
      Pack<T, sizeof(T) == 8 ? 2 : 4> out;
      constexpr int n = sizeof(T) == 8 ? 2 : 4;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        out.values[e % n] = narrow<T>(p.epilogue(row.at(column, r + e), span.row, feature + e));
        if (e % n == n - 1) store(p.out + row_at + feature + e - (n - 1), out);
      }
    });
  } else {
    for_each_feature(p.columns, p.num_feats, [&](int feature, int column, int r) {
      const A sum = row.at(column, r);
      if (span.part >= 0) {
        p.parts[part_at + feature] = sum;
      } else {
        p.write(span.row, feature, sum);
      }
    });
  }
}

template <typename T, typename I>
cudaError_t launch(const Params<T, I>& p, cudaStream_t stream) {
  const Block block = block_of(p.columns, sizeof(Acc<T>));
  if (block.threads == 0) return cudaErrorInvalidValue;
  const cudaError_t status = with_places(p.num_feats, [&](auto place) {
    return with_shape<T, I>(p.k, [&](auto shape) {
      const auto grid = static_cast<unsigned>(ceil_div(p.rows.workers, block.threads / kLanes));
      const auto run = [&](auto kernel) {
        const cudaError_t status = allow_shared(kernel, block.shared_bytes);
        if (status != cudaSuccess) return status;
        kernel<<<grid, block.threads, block.shared_bytes, stream>>>(p);
        return cudaGetLastError();
      };
      using P = decltype(place);
      using S = decltype(shape);
      return p.weight ? run(spgemm_kernel<T, I, P, S, true>) : run(spgemm_kernel<T, I, P, S, false>);
    });
  });
  return status == cudaSuccess ? merge_sums(p, p.num_feats, stream) : status;
}

}  // namespace

cudaError_t spgemm(Workspace& workspace, const Csr& graph, const WorkList& work, const Compressed& x,
                   const void* weight, void* out, DType dtype, const Fused& fused, cudaStream_t stream) {
  if (graph.num_rows == 0) return cudaSuccess;
  return with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p{};
    p.rows = rows_of<I>(graph, work);
    p.indices = static_cast<const I*>(graph.indices);
    p.edge_ids = static_cast<const I*>(graph.edge_ids);
    p.values = static_cast<const T*>(x.values);
    p.places = x.places;
    p.weight = static_cast<const T*>(weight);
    p.out = static_cast<T*>(out);
    p.parts = static_cast<Acc<T>*>(workspace.take(p.rows.num_parts * x.num_feats * accumulator_size(dtype)));
    p.epilogue = Epilogue<T>::of(fused);
    p.columns = columns_of(x.num_feats);
    p.k = static_cast<int>(x.k);
    p.num_feats = static_cast<int>(x.num_feats);
    p.fours = x.num_feats % 4 == 0 && p.columns.height >= 8 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
    return launch(p, stream);
  });
}

}  // namespace cuda
}  // namespace gnnaccel
