// SpMM by tiles on the CPU: the twin of cuda/spmm_tiled.cu, which says what the tiles are for. Here they are for
// nothing but to give the same results everywhere.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace gnnaccel {
namespace {

template <class T, class I>
void run(const Csr& graph, const Tiles& tiles, const T* x, const T* weight, T* out, int64_t num_feats, bool mean,
         int threads) {
  const int64_t height = tiles.height, width = tiles.width, words = (height * width + 63) / 64;
  const int64_t windows = (graph.num_rows + height - 1) / height;
  const auto *window_ptr = static_cast<const I*>(tiles.window_ptr), *columns = static_cast<const I*>(tiles.columns),
             *block_ptr = static_cast<const I*>(tiles.block_ptr), *indptr = static_cast<const I*>(graph.indptr);
  const auto* bits = static_cast<const uint64_t*>(tiles.bits);
  const int64_t tasks = std::min<int64_t>(windows, threads * int64_t{64});
  parallel_for(tasks, useful_threads(graph.nnz * num_feats, threads), [&](int64_t t) {
    std::vector<double> sums(static_cast<size_t>(height * num_feats));
    for (int64_t w = windows * t / tasks; w < windows * (t + 1) / tasks; ++w) {
      std::fill(sums.begin(), sums.end(), 0.0);
      for (int64_t b = window_ptr[w]; b < window_ptr[w + 1]; ++b) {
        int64_t at = block_ptr[b];
        for (int64_t bit = 0; bit < height * width; ++bit) {
          if (!(bits[b * words + bit / 64] >> bit % 64 & 1)) continue;
          const double factor = weight ? static_cast<double>(weight[at]) : 1.0;
          const T* from = x + static_cast<int64_t>(columns[b * width + bit % width]) * num_feats;
          double* to = sums.data() + bit / width * num_feats;
          for (int64_t d = 0; d < num_feats; ++d) to[d] += factor * static_cast<double>(from[d]);
          ++at;
        }
      }
      for (int64_t row = w * height; row < std::min(graph.num_rows, (w + 1) * height); ++row) {
        const double degree = mean ? std::max<double>(1, static_cast<double>(indptr[row + 1] - indptr[row])) : 1;
        const double* from = sums.data() + (row - w * height) * num_feats;
        for (int64_t d = 0; d < num_feats; ++d) out[row * num_feats + d] = static_cast<T>(from[d] / degree);
      }
    }
  });
}

}  // namespace

void spmm_tiled(const Csr& graph, const Tiles& tiles, const void* x, const void* weight, void* out, int64_t num_feats,
                bool mean, bool /* fast */, DType dtype, int threads) {
  auto with = [&](auto value, auto index) {
    using T = decltype(value);
    run<T, decltype(index)>(graph, tiles, static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<T*>(out),
                            num_feats, mean, threads);
  };
  const bool wide = graph.index_type == IndexType::i64;
  if (dtype == DType::f64) return wide ? with(double{}, int64_t{}) : with(double{}, int32_t{});
  wide ? with(float{}, int64_t{}) : with(float{}, int32_t{});
}

}  // namespace gnnaccel
