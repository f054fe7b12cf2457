// Rows for workers, long ones in pieces, with a work list or without.
//
// Without one each row is a worker's, but for those of more than `chunk` nonzeros, which are cut at its multiples: a
// worker each for the piece that enters a chunk and for the one that begins in it, found by a search in indptr.
#pragma once

#include "common.cuh"

namespace gnnaccel {
namespace cuda {

// The workspace has room for two pieces to a chunk, whatever rows there are: chunks are few, and long on large graphs.
constexpr int64_t kMinChunk = 128;
constexpr int64_t kMaxChunks = 8192;

template <typename I>
Rows<I> rows_of(const Csr& graph, const WorkList& work) {
  Rows<I> rows{};
  rows.indptr = static_cast<const I*>(graph.indptr);
  rows.num_rows = graph.num_rows;
  rows.nnz = graph.nnz;
  if (work.items) {
    rows.items = static_cast<const Item<I>*>(work.items);
    rows.steps = static_cast<const I*>(work.steps);
    rows.splits = static_cast<const Item<I>*>(work.splits);
    rows.workers = work.num_items;
    rows.num_parts = work.num_parts;
    rows.num_splits = work.num_splits;
    return rows;
  }
  rows.chunk = next_power_of_two(ceil_div(graph.nnz, kMaxChunks));
  if (rows.chunk < kMinChunk) rows.chunk = kMinChunk;
  rows.num_splits = graph.nnz > rows.chunk ? ceil_div(graph.nnz, rows.chunk) : 0;
  rows.num_parts = 2 * rows.num_splits;
  rows.workers = rows.num_parts + graph.num_rows;
  return rows;
}

}  // namespace cuda
}  // namespace gnnaccel
