// Values of edges from the order of edge ids into that of the nonzeros, and back: copies, for any dtype.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace gnnaccel {
namespace {

constexpr int64_t kChunk = 16384;

template <class I>
void copy(const I* edge_ids, const char* in, char* out, int64_t num_edges, int64_t bytes, bool scatter, int threads) {
  parallel_for((num_edges + kChunk - 1) / kChunk, useful_threads(num_edges * 4, threads), [&](int64_t t) {
    for (int64_t k = t * kChunk; k < std::min(num_edges, (t + 1) * kChunk); ++k) {
      const int64_t e = edge_ids[k];
      std::memcpy(out + (scatter ? e : k) * bytes, in + (scatter ? k : e) * bytes, bytes);
    }
  });
}

}  // namespace

void edge_order(const void* edge_ids, const void* in, void* out, int64_t num_edges, int64_t edge_bytes, bool scatter,
                IndexType index_type, int threads) {
  const auto* from = static_cast<const char*>(in);
  auto* to = static_cast<char*>(out);
  index_type == IndexType::i64
      ? copy(static_cast<const int64_t*>(edge_ids), from, to, num_edges, edge_bytes, scatter, threads)
      : copy(static_cast<const int32_t*>(edge_ids), from, to, num_edges, edge_bytes, scatter, threads);
}

}  // namespace gnnaccel
