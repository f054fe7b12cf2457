// SSpMM of MaxK-GNN, the gradient of spgemm.cu: grad_values[c, j] = sum over nonzeros (r, c, e) of weight[e] *
// row_scale[r] * grad[r, places[c, j]].
//
// Two ways. By destination (an outer product): a worker of eight lanes has a row of grad in shared memory
// (compressed.cuh), and for each source reads its places, collects what lies there and adds it to the source's values:
// nnz * k bytes of places, nnz * 4 k of reductions, as vectors of 16 bytes from sm_90 on. They arrive in any order, so
// the last bits may change from run to run. By source, over the transposed graph: a worker has a source's places in
// registers and reads grad there, row by row: the same bits on every run, but memory moves in sectors of 32 bytes, of
// which 32 places of 256 touch two thirds.
//
// MaxK-GNN (Peng et al., 2024) has the first, with one atomic per value.
#include "compressed.cuh"
#include "pieces.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

template <typename T, typename I>
struct Params {
  Rows<I> rows;
  const I* indices;
  const I* edge_ids;
  const T* grad;
  const void* places;
  const T* weight;
  const Acc<T>* row_scale;
  Acc<T>* out;
  Acc<T>* parts;  // by source: [num_parts, k]
  Columns columns;
  int64_t num_sources;
  int k;
  int num_feats;
  bool fours;  // rows of grad are whole fours of features, aligned

  __device__ __forceinline__ void write(int64_t source, int64_t entry, Acc<T> sum) const {
    out[source * k + entry] = sum;
  }
};

// Adds N values to N that lie 4 N bytes aligned. Their old values are not asked for.
template <int N, typename A>
__device__ __forceinline__ void reduce_add(A* to, const A (&values)[N]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (sizeof(A) == 4 && N == 4) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(values[0]), "f"(values[1]),
                 "f"(values[2]), "f"(values[3])
                 : "memory");
  } else if constexpr (sizeof(A) == 4 && N == 2) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(values[0]), "f"(values[1]) : "memory");
  } else
#endif
  {
#pragma unroll
    for (int i = 0; i < N; ++i) atomicAdd(to + i, values[i]);
  }
}

// The row of grad that belongs to a worker's span, scaled, into shared memory.
template <typename T, typename I>
__device__ __forceinline__ void stage(const Params<T, I>& p, const Span<I>& span, const DenseRow<Acc<T>>& row) {
  constexpr int fours = 4;  // of a lane in flight; eight would take local memory
  if (span.begin < span.end) {
    const int lane = threadIdx.x % kLanes;
    const T* from = p.grad + static_cast<int64_t>(span.row) * p.num_feats;
    const Acc<T> scale = p.row_scale ? __ldg(p.row_scale + span.row) : Acc<T>(1);
    if constexpr (sizeof(T) <= 4) {
      for (int first = 0; p.fours && first < p.columns.height; first += 4 * fours) {
        Pack<T, 4> some[fours];
        // Two lanes share a sector: columns lane & ~1 and the next, in turn.
        auto place = [&](int i, int& column, int& r) {
          column = (lane & ~1) + i % 2;
          r = first + i / 2 * 8 + 4 * (lane & 1);
          return r < p.columns.height && column * p.columns.height + r < p.num_feats;
        };
        int column, r;
#pragma unroll
        for (int i = 0; i < fours; ++i) {
          if (place(i, column, r)) load(from + column * p.columns.height + r, some[i]);
        }
#pragma unroll
        for (int i = 0; i < fours; ++i) {
          if (!place(i, column, r)) continue;
#pragma unroll
          for (int e = 0; e < 4; ++e) row.at(column, r + e) = scale * widen(some[i].values[e]);
        }
      }
    }
    if (!p.fours) {
      for_each_feature(p.columns, p.num_feats,
                       [&](int feature, int column, int r) { row.at(column, r) = scale * load_one(from + feature); });
    }
  }
  __syncwarp();
}

// ENTRIES of each source (from blockIdx.y * ENTRIES on), by the worker's lanes VECTOR at a time, in turn, so that
// reductions fill sectors; where these are fewer than eight such vectors, of several sources at once. ENTRIES 0: all,
// one by one.
template <typename T, typename I, typename P, int VECTOR, int ENTRIES, bool WEIGHTED>
__global__ void __launch_bounds__(kCompressedThreads, sizeof(T) <= 4 ? 5 : 2) outer_kernel(const Params<T, I> p) {
  using A = Acc<T>;
  constexpr int V = VECTOR;
  constexpr int turns = ENTRIES > kLanes * V ? ENTRIES / (kLanes * V) : 1;       // of a lane, for one source
  constexpr int lanes = ENTRIES && ENTRIES < kLanes * V ? ENTRIES / V : kLanes;  // for one source
  constexpr int sources = kLanes / lanes;                                        // at once
  constexpr int batch = ENTRIES ? (turns > 1 ? 4 : 8) : 1;                       // nonzeros in flight
  constexpr int rounds = ENTRIES ? batch / sources : 1;
  extern __shared__ uint4 shared_rows[];
  const int lane = threadIdx.x % kLanes;
  const Span<I> span = span_of(p.rows, static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes);
  const I ahead = source_at(span, p.indices, span.begin);
  const DenseRow<A> row = dense_row_of<A>(shared_rows, p.columns);
  stage(p, span, row);
  const P* all_places = static_cast<const P*>(p.places);
  auto collect = [&](const Pack<P, V>& places, A weight, I source, int at) {
    A sum[V];
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = weight * row[places.values[i]];
    reduce_add(p.out + static_cast<int64_t>(source) * p.k + at, sum);
  };
  walk<batch, WEIGHTED>(span, ahead, p.indices, p.edge_ids, p.weight,
                        [&](auto full, int first, I col, A weight, I left) {
                          constexpr bool FULL = decltype(full)::value;
                          if constexpr (ENTRIES > 0) {
                            Pack<P, V> places[rounds][turns];
                            const int own = blockIdx.y * ENTRIES + lane % lanes * V;
#pragma unroll
                            for (int u = 0; u < rounds; ++u) {
                              const int j = first + u * sources + lane / lanes;
                              const I source = __shfl_sync(~0u, col, j, kLanes);
                              if (!FULL && j >= left) continue;
#pragma unroll
                              for (int i = 0; i < turns; ++i) {
                                load(row_address(all_places, source, p.k) + own + i * kLanes * V, places[u][i]);
                              }
                            }
#pragma unroll
                            for (int u = 0; u < rounds; ++u) {
                              const int j = first + u * sources + lane / lanes;
                              const I source = __shfl_sync(~0u, col, j, kLanes);
                              const A scale = WEIGHTED ? __shfl_sync(~0u, weight, j, kLanes) : A(1);
                              if (!FULL && j >= left) continue;
#pragma unroll
                              for (int i = 0; i < turns; ++i)
                                collect(places[u][i], scale, source, own + i * kLanes * V);
                            }
                          } else {
                            const I source = __shfl_sync(~0u, col, first, kLanes);
                            const A scale = WEIGHTED ? __shfl_sync(~0u, weight, first, kLanes) : A(1);
                            if (!FULL && first >= left) return;
                            for (int i = lane * V; i < p.k; i += kLanes * V) {
                              Pack<P, V> places;
                              load(row_address(all_places, source, p.k) + i, places);
                              collect(places, scale, source, i);
                            }
                          }
                        });
}

// Entries of a lane in by_source_kernel, at most; a worker takes eight times as many of a source (blockIdx.y).
constexpr int kMaxOwn = 4;

template <typename T, typename I, typename P, int OWN, bool WEIGHTED>
__global__ void __launch_bounds__(kCompressedThreads) by_source_kernel(const Params<T, I> p) {
  using A = Acc<T>;
  constexpr int batch = OWN == 4 ? 4 : 8;  // edges in flight
  const int lane = threadIdx.x % kLanes;
  const Span<I> span = span_of(p.rows, static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes);
  const int own = (blockIdx.y * kLanes + lane) * OWN;
  P places[OWN];
  A sum[OWN];
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const bool there = span.present && own + i < p.k;
    places[i] = there ? static_cast<const P*>(p.places)[static_cast<int64_t>(span.row) * p.k + own + i] : P{0};
    sum[i] = 0;
  }
  walk<batch, WEIGHTED>(span, source_at(span, p.indices, span.begin), p.indices, p.edge_ids, p.weight,
                        [&](auto full, int first, I col, A weight, I left) {
                          constexpr bool FULL = decltype(full)::value;
                          if (p.row_scale) weight *= threadIdx.x % kLanes < left ? __ldg(p.row_scale + col) : A(0);
                          A grads[batch][OWN];
#pragma unroll
                          for (int u = 0; u < batch; ++u) {
                            const T* from = row_address(p.grad, __shfl_sync(~0u, col, first + u, kLanes), p.num_feats);
#pragma unroll
                            for (int i = 0; i < OWN; ++i)
                              grads[u][i] = FULL || first + u < left ? load_one(from + places[i]) : A(0);
                          }
#pragma unroll
                          for (int u = 0; u < batch; ++u) {
                            const A scale =
                                WEIGHTED || p.row_scale ? __shfl_sync(~0u, weight, first + u, kLanes) : A(1);
#pragma unroll
                            for (int i = 0; i < OWN; ++i) {
                              if (FULL || first + u < left) sum[i] += scale * grads[u][i];
                            }
                          }
                        });
  if (!span.present) return;
  A* to = span.part >= 0 ? p.parts + span.part * p.k : p.out + static_cast<int64_t>(span.row) * p.k;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    if (own + i < p.k) to[own + i] = sum[i];
  }
}

template <typename T, typename I>
cudaError_t launch_outer(const Params<T, I>& p, cudaStream_t stream) {
  const Block block = block_of(p.columns, sizeof(Acc<T>));
  if (block.threads == 0) return cudaErrorInvalidValue;
  int device = 0, l2_bytes = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device);
  if (status != cudaSuccess) return status;
  const auto run = [&](auto kernel, int slices) {
    const dim3 grid(static_cast<unsigned>(ceil_div(p.rows.workers, block.threads / kLanes)), slices);
    const cudaError_t status = allow_shared(kernel, block.shared_bytes);
    if (status != cudaSuccess) return status;
    kernel<<<grid, block.threads, block.shared_bytes, stream>>>(p);
    return cudaGetLastError();
  };
  return with_places(p.num_feats, [&](auto place) {
    using P = decltype(place);
    const auto with = [&](auto vector, auto entries) {
      const int slices = entries ? p.k / entries : 1;
      return p.weight ? run(outer_kernel<T, I, P, vector, entries, true>, slices)
                      : run(outer_kernel<T, I, P, vector, entries, false>, slices);
    };
    using Four = std::integral_constant<int, 4>;
    using Any = std::integral_constant<int, 0>;
    if constexpr (sizeof(T) <= 4 && sizeof(I) == 4) {
      if (p.k == 8) return with(Four{}, std::integral_constant<int, 8>{});
      if (p.k == 16) return with(std::integral_constant<int, 2>{}, std::integral_constant<int, 16>{});
      // Reductions want what they add to in L2: half of the entries at a time, if all do not fit. H200, reddit-like,
      // k = 64: 11.3 ms in one go.
      const int64_t added_to = p.num_sources * p.k * static_cast<int64_t>(sizeof(Acc<T>));
      const bool halve = p.k == 64 && added_to > l2_bytes / 3 * 2 && added_to / 2 <= l2_bytes / 3 * 2;
      if (p.k % 64 == 0 && !halve) return with(Four{}, std::integral_constant<int, 64>{});
      if (p.k % 32 == 0) return with(Four{}, std::integral_constant<int, 32>{});
    }
    if constexpr (sizeof(T) <= 4) {
      if (p.k % 4 == 0) return with(Four{}, Any{});
    }
    return with(std::integral_constant<int, 1>{}, Any{});
  });
}

template <typename T, typename I>
cudaError_t launch_by_source(const Params<T, I>& p, cudaStream_t stream) {
  const cudaError_t status = with_places(p.num_feats, [&](auto place) {
    using P = decltype(place);
    auto run = [&](auto own) {
      const dim3 grid(static_cast<unsigned>(ceil_div(p.rows.workers, kCompressedThreads / kLanes)),
                      static_cast<unsigned>(ceil_div(p.k, own * kLanes)));
      if (p.weight) {
        by_source_kernel<T, I, P, own, true><<<grid, kCompressedThreads, 0, stream>>>(p);
      } else {
        by_source_kernel<T, I, P, own, false><<<grid, kCompressedThreads, 0, stream>>>(p);
      }
      return cudaGetLastError();
    };
    if (p.k <= kLanes) return run(std::integral_constant<int, 1>{});
    if (p.k <= 2 * kLanes) return run(std::integral_constant<int, 2>{});
    return run(std::integral_constant<int, kMaxOwn>{});
  });
  return status == cudaSuccess ? merge_sums(p, p.k, stream) : status;
}

}  // namespace

cudaError_t sspmm(Workspace& workspace, const Csr& graph, const WorkList& work, const void* grad,
                  const Compressed& kept, const void* weight, const void* row_scale, void* grad_values, bool by_source,
                  DType dtype, cudaStream_t stream) {
  if (graph.num_rows == 0) return cudaSuccess;
  return with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    using I = decltype(index);
    Params<T, I> p{};
    p.rows = rows_of<I>(graph, work);
    p.indices = static_cast<const I*>(graph.indices);
    p.edge_ids = static_cast<const I*>(graph.edge_ids);
    p.grad = static_cast<const T*>(grad);
    p.places = kept.places;
    p.weight = static_cast<const T*>(weight);
    p.row_scale = static_cast<const Acc<T>*>(row_scale);
    p.out = static_cast<Acc<T>*>(grad_values);
    const int64_t parts = by_source ? p.rows.num_parts : 0;
    p.parts = static_cast<Acc<T>*>(workspace.take(parts * kept.k * accumulator_size(dtype)));
    p.columns = columns_of(kept.num_feats);
    p.num_sources = graph.num_cols;
    p.k = static_cast<int>(kept.k);
    p.num_feats = static_cast<int>(kept.num_feats);
    p.fours = sizeof(T) <= 4 && kept.num_feats % 4 == 0 && p.columns.height >= 8 &&
              reinterpret_cast<uintptr_t>(grad) % 16 == 0;
    return by_source ? launch_by_source(p, stream) : launch_outer(p, stream);
  });
}

}  // namespace cuda
}  // namespace gnnaccel
