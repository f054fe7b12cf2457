// SpMM and SDDMM by tiles on the CPU: the twins of cuda/spmm_tiled.cu and cuda/sddmm_tiled.cu, which say what tiles are
// for. Here they are for nothing but to give the same results everywhere.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace gnnaccel {
namespace {

// The nonzeros of a window.
template <class I>
struct Windows {
  const Tiles& tiles;
  int64_t count;

  Windows(const Csr& graph, const Tiles& tiles)
      : tiles(tiles), count((graph.num_rows + tiles.height - 1) / tiles.height) {}

  // body(row in the window, column, edge id) for each of them.
  template <class Body>
  void visit(int64_t window, const Body& body) const {
    const int64_t width = tiles.width, bits_of_block = tiles.height * width, words = (bits_of_block + 63) / 64;
    const auto *window_ptr = static_cast<const I*>(tiles.window_ptr), *columns = static_cast<const I*>(tiles.columns),
               *block_ptr = static_cast<const I*>(tiles.block_ptr), *edges = static_cast<const I*>(tiles.edges);
    const auto* bits = static_cast<const uint64_t*>(tiles.bits);
    for (int64_t b = window_ptr[window]; b < window_ptr[window + 1]; ++b) {
      int64_t at = block_ptr[b];
      for (int64_t bit = 0; bit < bits_of_block; ++bit) {
        if (bits[b * words + bit / 64] >> bit % 64 & 1)
          body(bit / width, columns[b * width + bit % width], edges[at++]);
      }
    }
  }

  // body(first window, end) for parts of them, on all threads.
  template <class Body>
  void in_parallel(int64_t work, int threads, const Body& body) const {
    const int64_t tasks = std::min<int64_t>(count, threads * int64_t{64});
    parallel_for(tasks, useful_threads(work, threads),
                 [&](int64_t t) { body(count * t / tasks, count * (t + 1) / tasks); });
  }
};

template <class T, class I>
void sum_rows(const Csr& graph, const Tiles& tiles, const T* x, const T* weight, T* out, int64_t num_feats, bool mean,
              int threads) {
  const Windows<I> windows(graph, tiles);
  const auto* indptr = static_cast<const I*>(graph.indptr);
  const int64_t height = tiles.height;
  windows.in_parallel(graph.nnz * num_feats, threads, [&](int64_t begin, int64_t end) {
    std::vector<double> sums(static_cast<size_t>(height * num_feats));
    for (int64_t w = begin; w < end; ++w) {
      std::fill(sums.begin(), sums.end(), 0.0);
      windows.visit(w, [&](int64_t row, int64_t column, int64_t edge) {
        const double factor = weight ? static_cast<double>(weight[edge]) : 1.0;
        const T* from = x + column * num_feats;
        double* to = sums.data() + row * num_feats;
        for (int64_t d = 0; d < num_feats; ++d) to[d] += factor * static_cast<double>(from[d]);
      });
      for (int64_t row = w * height; row < std::min(graph.num_rows, (w + 1) * height); ++row) {
        const double degree = mean ? std::max<double>(1, static_cast<double>(indptr[row + 1] - indptr[row])) : 1;
        const double* from = sums.data() + (row - w * height) * num_feats;
        for (int64_t d = 0; d < num_feats; ++d) out[row * num_feats + d] = static_cast<T>(from[d] / degree);
      }
    }
  });
}

template <class T, class I>
void dots(const Csr& graph, const Tiles& tiles, const T* x, const T* y, T* out, int64_t num_heads, int64_t len,
          int threads) {
  const Windows<I> windows(graph, tiles);
  windows.in_parallel(graph.nnz * num_heads * len, threads, [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) {
      windows.visit(w, [&](int64_t row, int64_t column, int64_t edge) {
        for (int64_t h = 0; h < num_heads; ++h) {
          const T* source = x + (column * num_heads + h) * len;
          const T* target = y + ((w * tiles.height + row) * num_heads + h) * len;
          double sum = 0;
          for (int64_t d = 0; d < len; ++d) sum += static_cast<double>(source[d]) * static_cast<double>(target[d]);
          out[edge * num_heads + h] = static_cast<T>(sum);
        }
      });
    }
  });
}

// f(T{}, I{}) with the C++ types of f32 or f64 and an index type.
template <class F>
void with_types(DType dtype, IndexType index_type, const F& f) {
  const bool wide = index_type == IndexType::i64;
  if (dtype == DType::f64) return wide ? f(double{}, int64_t{}) : f(double{}, int32_t{});
  wide ? f(float{}, int64_t{}) : f(float{}, int32_t{});
}

}  // namespace

void spmm_tiled(const Csr& graph, const Tiles& tiles, const void* x, const void* weight, void* out, int64_t num_feats,
                bool mean, bool /* fast */, DType dtype, int threads) {
  with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    sum_rows<T, decltype(index)>(graph, tiles, static_cast<const T*>(x), static_cast<const T*>(weight),
                                 static_cast<T*>(out), num_feats, mean, threads);
  });
}

void sddmm_tiled(const Csr& graph, const Tiles& tiles, const void* x, const void* y, void* out, int64_t num_heads,
                 int64_t len, bool /* fast */, DType dtype, int threads) {
  with_types(dtype, graph.index_type, [&](auto value, auto index) {
    using T = decltype(value);
    dots<T, decltype(index)>(graph, tiles, static_cast<const T*>(x), static_cast<const T*>(y), static_cast<T*>(out),
                             num_heads, len, threads);
  });
}

}  // namespace gnnaccel
