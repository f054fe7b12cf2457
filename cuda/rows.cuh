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

// How rows are handed out: along a work list, or (null items) as they come, long ones in chunks.
template <typename I>
struct Rows {
  const Item<I>* items;
  const I* steps;
  const Item<I>* splits;
  const I* indptr;
  int64_t num_rows;
  int64_t nnz;
  int64_t chunk;
  int64_t workers;
  int64_t num_parts;
  int64_t num_splits;  // with a list: rows in pieces; else chunks, of which each may be the first of such a row
};

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

// What a worker is to do: nonzeros begin .. end - 1 of a row, in runs of kPieceRun with `skip` nonzeros of other
// pieces between them; part: the number of the piece among all, or -1 for a whole row.
template <typename I>
struct Span {
  I row = 0;
  I begin = 0;
  I end = 0;
  I skip = 0;
  int64_t part = -1;
  bool present = false;
};

template <typename I>
__device__ __forceinline__ Span<I> span_of(const Rows<I>& rows, int64_t worker) {
  Span<I> span;
  if (worker >= rows.workers) return span;
  span.present = true;
  if (rows.items) {
    const Item<I> item = load_item(rows.items + worker);
    span.row = item.row;
    span.begin = item.begin;
    span.end = item.end;
    if (item.part) {
      span.part = item.part - 1;
      span.skip = __ldg(rows.steps + span.part) - kPieceRun;
    }
    return span;
  }
  const bool cutting = worker < rows.num_parts;
  if (!cutting) {
    span.row = static_cast<I>(worker - rows.num_parts);
    span.begin = __ldg(rows.indptr + span.row);
    span.end = __ldg(rows.indptr + span.row + 1);
    span.present = span.end - span.begin <= rows.chunk;
    if (!span.present) span.end = span.begin;
    return span;
  }
  // A long row is longer than a chunk, so it holds the chunk's first nonzero or its last.
  const int64_t low = worker / 2 * rows.chunk;
  const int64_t high = low + rows.chunk < rows.nnz ? low + rows.chunk : rows.nnz;
  const bool begins = worker % 2;
  span.row = static_cast<I>(find_row(rows.indptr, rows.num_rows, begins ? high - 1 : low));
  const I begin = __ldg(rows.indptr + span.row), end = __ldg(rows.indptr + span.row + 1);
  span.present = end - begin > rows.chunk && (begin > low) == begins;
  if (!span.present) return span;
  span.part = worker;
  span.begin = begin > low ? begin : static_cast<I>(low);
  span.end = end < high ? end : static_cast<I>(high);
  return span;
}

// A row in pieces.
template <typename I>
struct Pieces {
  int64_t row;
  int64_t first;  // its first piece, or chunk
  int64_t count;
  bool at_start;  // without a list: the row begins where its first chunk does
  bool listed;

  __device__ __forceinline__ int64_t operator[](int64_t j) const {
    return listed ? first + j : 2 * (first + j) + (j == 0 && !at_start);
  }
};

// The i-th such row, count 0 if there is none: a chunk may be the first of none.
template <typename I>
__device__ __forceinline__ Pieces<I> pieces_of(const Rows<I>& rows, int64_t i) {
  Pieces<I> pieces{0, 0, 0, false, rows.items != nullptr};
  if (i >= rows.num_splits) return pieces;
  if (pieces.listed) {
    const Item<I> split = load_item(rows.splits + i);  // row, its first piece, number of pieces, degree
    pieces.row = split.row;
    pieces.first = split.begin;
    pieces.count = split.end;
    return pieces;
  }
  // Whichever row holds the last nonzero of the chunk is the only one that can begin in it, or just at its start, and
  // leave it.
  const int64_t low = i * rows.chunk, high = low + rows.chunk < rows.nnz ? low + rows.chunk : rows.nnz;
  pieces.row = find_row(rows.indptr, rows.num_rows, high - 1);
  const int64_t begin = __ldg(rows.indptr + pieces.row), end = __ldg(rows.indptr + pieces.row + 1);
  if (end - begin <= rows.chunk || begin < low) return pieces;
  pieces.first = i;
  pieces.count = (end - 1) / rows.chunk - i + 1;
  pieces.at_start = begin == low;
  return pieces;
}

}  // namespace cuda
}  // namespace gnnaccel
