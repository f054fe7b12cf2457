// Windows of a translated graph (cpp/types.h: Tiles) and the warps that work on them.
//
// A team of `tiles.team` warps of one thread block has a window, or a piece of one of more than `tiles.chunk` blocks,
// and takes its blocks in turns.
#pragma once

#include "mma.cuh"
#include "rows.cuh"

namespace gnnaccel {
namespace cuda {

struct TileConfig {
  static constexpr int height = 16;  // of a window: two matrix instructions side by side
  static constexpr int width = 8;    // of a block
  static constexpr int halves = 2;   // of a window, 8 rows each
  static constexpr int threads = 128;
  static constexpr int max_team = 8;  // its block has twice the threads
  static constexpr int max_threads = 32 * max_team;
  static_assert(height == 8 * halves && halves * height * width == 4 * 64, "a word of bits is a half of a block");
};

template <typename I>
struct Windows {
  Rows<I> rows;  // windows in place of rows, blocks in place of nonzeros
  const I* columns;
  const uint64_t* bits;
  const I* block_ptr;
  const I* edges;
  int team;

  int threads() const { return 32 * team > TileConfig::threads ? 32 * team : TileConfig::threads; }
  unsigned blocks() const { return static_cast<unsigned>(ceil_div(rows.workers * team, threads() / 32)); }
};

inline bool fits_kernels(const Tiles& tiles) {
  const bool team = tiles.team == 1 || tiles.team == 2 || tiles.team == 4 || tiles.team == TileConfig::max_team;
  return tiles.height == TileConfig::height && tiles.width == TileConfig::width && team && tiles.chunk >= 1;
}

template <typename I>
Windows<I> windows_of(const Csr& graph, const Tiles& tiles) {
  Windows<I> all{};
  Rows<I>& rows = all.rows;
  rows.indptr = static_cast<const I*>(tiles.window_ptr);
  rows.num_rows = ceil_div(graph.num_rows, TileConfig::height);
  rows.nnz = tiles.num_blocks;
  rows.chunk = tiles.chunk;
  rows.num_splits = tiles.longest > rows.chunk ? ceil_div(tiles.num_blocks, rows.chunk) : 0;
  rows.num_parts = 2 * rows.num_splits;
  rows.workers = rows.num_parts + rows.num_rows;
  all.columns = static_cast<const I*>(tiles.columns);
  all.bits = static_cast<const uint64_t*>(tiles.bits);
  all.block_ptr = static_cast<const I*>(tiles.block_ptr);
  all.edges = static_cast<const I*>(tiles.edges);
  all.team = static_cast<int>(tiles.team);
  return all;
}

// What this thread's warp is to do: B neighbouring blocks from `first` on, and again after every `stride`.
template <typename I, int B>
struct Share {
  Span<I> span;
  int member;  // of the team
  I first;
  I stride;

  __device__ __forceinline__ explicit Share(const Windows<I>& windows) {
    const int warp = threadIdx.x / 32;
    span = span_of(windows.rows,
                   static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32 / windows.team) + warp / windows.team);
    member = warp % windows.team;
    first = span.begin + static_cast<I>(member * B);
    stride = static_cast<I>(windows.team * B);
  }
};

}  // namespace cuda
}  // namespace gnnaccel
