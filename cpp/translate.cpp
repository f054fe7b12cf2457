// Sparse graph translation on the CPU, window by window (types.h: Tiles).
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "rows.h"

namespace gnnaccel {
namespace {

constexpr int64_t kTasksOfThread = 8;

// body(window, first row, last row) over all windows, in tasks of about equally many nonzeros.
template <class I, class Body>
void for_windows(const CsrOf<I>& g, int64_t height, int threads, const Body& body) {
  const int64_t windows = (g.num_rows + height - 1) / height;
  const int64_t tasks = std::min<int64_t>(windows, threads <= 1 ? 1 : threads * kTasksOfThread);
  const int64_t cost = g.nnz + g.num_rows;
  auto start = [&](int64_t t) {
    return t == tasks ? windows : (row_at_cost(g, cost * t / tasks) + height - 1) / height;
  };
  parallel_for(tasks, threads, [&](int64_t t) {
    for (int64_t w = start(t); w < start(t + 1); ++w) body(w, w * height, std::min(g.num_rows, (w + 1) * height));
  });
}

int bits_below(uint64_t word, int bit) { return __builtin_popcountll(word & ((uint64_t{1} << bit) - 1)); }

template <class I>
struct Entry {
  I column;
  I k;
};

template <class I>
void find_columns(const Csr& graph, int64_t height, I* columns, I* window_columns, int threads) {
  const CsrOf<I> g(graph);
  for_windows(g, height, useful_threads(g.nnz * 8, threads), [&](int64_t w, int64_t first, int64_t last) {
    std::vector<Entry<I>> entries;
    std::vector<I> row_of_entry(static_cast<size_t>(g.indptr[last] - g.indptr[first]));
    const I begin = g.indptr[first];
    for (int64_t row = first; row < last; ++row)
      for (I k = g.indptr[row]; k < g.indptr[row + 1]; ++k) {
        entries.push_back({g.indices[k], k});
        row_of_entry[k - begin] = static_cast<I>(row);
      }
    std::sort(entries.begin(), entries.end(), [](const Entry<I>& a, const Entry<I>& b) {
      return a.column != b.column ? a.column < b.column : a.k < b.k;
    });
    // A column's nonzeros come row by row: the j-th of a row takes the column's j-th place.
    I place = 0, places = 0, again = 0;  // of the column: its first, how many; and j
    for (size_t i = 0; i < entries.size(); ++i) {
      const bool same_column = i && entries[i].column == entries[i - 1].column;
      const bool same_row = i && row_of_entry[entries[i].k - begin] == row_of_entry[entries[i - 1].k - begin];
      if (!same_column) place += places, places = 0;
      again = same_column && same_row ? again + 1 : 0;
      places = std::max<I>(places, again + 1);
      columns[entries[i].k] = place + again;
    }
    window_columns[w] = place + places;
  });
}

template <class I>
void make_blocks(const Csr& graph, const I* columns, const Tiles& tiles, int threads) {
  const CsrOf<I> g(graph);
  const int64_t height = tiles.height, width = tiles.width, words = (height * width + 63) / 64;
  const I* window_ptr = static_cast<const I*>(tiles.window_ptr);
  auto writable = [](const void* from) { return static_cast<I*>(const_cast<void*>(from)); };
  I *sources = writable(tiles.columns), *block_ptr = writable(tiles.block_ptr), *edges = writable(tiles.edges);
  auto* bits = static_cast<uint64_t*>(const_cast<void*>(tiles.bits));
  block_ptr[tiles.num_blocks] = static_cast<I>(g.nnz);
  for_windows(g, height, useful_threads(g.nnz * 8, threads), [&](int64_t w, int64_t first, int64_t last) {
    const I begin = window_ptr[w], end = window_ptr[w + 1];
    std::fill(sources + begin * width, sources + end * width, I{-1});
    std::fill(bits + begin * words, bits + end * words, uint64_t{0});
    // Word and bit of nonzero k.
    auto find = [&](int64_t row, I k, int64_t& block, int64_t& word, int& bit) {
      block = begin + columns[k] / width;
      const int64_t inside = (row - first) * width + columns[k] % width;
      word = block * words + inside / 64;
      bit = static_cast<int>(inside % 64);
    };
    int64_t block, word;
    int bit;
    auto for_nonzeros = [&](const auto& body) {
      for (int64_t row = first; row < last; ++row)
        for (I k = g.indptr[row]; k < g.indptr[row + 1]; ++k) {
          find(row, k, block, word, bit);
          body(k);
        }
    };
    for_nonzeros([&](I k) {
      bits[word] |= uint64_t{1} << bit;
      sources[begin * width + columns[k]] = g.indices[k];
    });
    I place = g.indptr[first];
    for (int64_t b = begin; b < end; ++b) {
      block_ptr[b] = place;
      for (int64_t i = 0; i < words; ++i) place += static_cast<I>(__builtin_popcountll(bits[b * words + i]));
    }
    for_nonzeros([&](I k) {
      I at = block_ptr[block] + static_cast<I>(bits_below(bits[word], bit));
      for (int64_t i = block * words; i < word; ++i) at += static_cast<I>(__builtin_popcountll(bits[i]));
      edges[at] = static_cast<I>(g.edge(k));
    });
  });
}

}  // namespace

void translate_columns(const Csr& graph, int64_t height, void* columns, void* window_columns, int threads) {
  if (graph.index_type == IndexType::i64)
    find_columns(graph, height, static_cast<int64_t*>(columns), static_cast<int64_t*>(window_columns), threads);
  else
    find_columns(graph, height, static_cast<int32_t*>(columns), static_cast<int32_t*>(window_columns), threads);
}

void translate_blocks(const Csr& graph, const void* columns, const Tiles& tiles, int threads) {
  if (graph.index_type == IndexType::i64)
    make_blocks(graph, static_cast<const int64_t*>(columns), tiles, threads);
  else
    make_blocks(graph, static_cast<const int32_t*>(columns), tiles, threads);
}

}  // namespace gnnaccel
