// Values of edges from the order of edge ids into that of the nonzeros, and back. A kernel that looks edges up itself
// fetches a sector of 32 bytes for each, again for every slice of the features, and far from when its neighbours in
// memory are used; here nonzeros are taken as they lie, so that near ones share what sectors they can.
#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;  // values of a thread, whose reads are under way together

// U: what is copied at a time, `units` of it a value; kUnits: units, or 0 where that is not known ahead.
template <bool kById, int kUnits, typename U, typename I>
__global__ void __launch_bounds__(kThreads)
    edge_order_kernel(const I* edge_ids, const U* in, U* out, int64_t count, int64_t units) {
  const int64_t n = kUnits ? kUnits : units;
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kThreads * kEach + threadIdx.x;
  int64_t from[kEach], to[kEach];
  U value[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int64_t i = base + j * kThreads;
    from[j] = to[j] = i;
    if (i >= count) continue;
    const int64_t k = i / n, other = static_cast<int64_t>(edge_ids[k]) * n + (i - k * n);
    (kById ? to : from)[j] = other;
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (base + j * kThreads < count) value[j] = in[from[j]];
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (base + j * kThreads < count) out[to[j]] = value[j];
}

template <bool kById, typename U, typename I>
void launch(const void* edge_ids, const void* in, void* out, int64_t num_edges, int64_t units, cudaStream_t stream) {
  const int64_t count = num_edges * units;
  const auto blocks = static_cast<unsigned>(ceil_div(count, kThreads * kEach));
  const auto run = [&](auto kernel) {
    kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const I*>(edge_ids), static_cast<const U*>(in),
                                            static_cast<U*>(out), count, units);
  };
  if (units == 1) return run(edge_order_kernel<kById, 1, U, I>);
  if (units == 2) return run(edge_order_kernel<kById, 2, U, I>);
  run(edge_order_kernel<kById, 0, U, I>);
}

// Calls f(U{}) with the widest type that divides a value's bytes and both addresses.
template <typename F>
void with_unit(int64_t bytes, const void* in, const void* out, F f) {
  const auto all = static_cast<uint64_t>(bytes) | reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out);
  all % 16 == 0 ? f(uint4{}) : all % 8 == 0 ? f(uint2{}) : all % 4 == 0 ? f(uint32_t{}) : f(uint16_t{});
}

}  // namespace

cudaError_t edge_order(const void* edge_ids, const void* in, void* out, int64_t num_edges, int64_t edge_bytes,
                       bool scatter, IndexType index_type, cudaStream_t stream) {
  if (num_edges == 0 || edge_bytes == 0) return cudaSuccess;
  if (edge_bytes % 2) return cudaErrorInvalidValue;
  return with_index(index_type, [&](auto index) {
    with_unit(edge_bytes, in, out, [&](auto unit) {
      using U = decltype(unit);
      using I = decltype(index);
      const int64_t units = edge_bytes / static_cast<int64_t>(sizeof(U));
      scatter ? launch<true, U, I>(edge_ids, in, out, num_edges, units, stream)
              : launch<false, U, I>(edge_ids, in, out, num_edges, units, stream);
    });
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace gnnaccel
