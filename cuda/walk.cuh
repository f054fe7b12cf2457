// How rows are handed out to workers, and what their pieces left is merged: device code that needs no header, so that
// NVRTC compiles it too (gnnaccel/ops/messages/generated.py).
#pragma once

namespace gnnaccel {
namespace cuda {

// Nonzeros of a run of a piece (types.h: WorkList).
constexpr int kPieceRun = 16;

// One entry of a work list (kernels.h): a row, or a piece of it. 16-byte aligned.
template <typename I>
struct alignas(16) Item {
  I row;
  I begin;  // first nonzero
  I end;    // of the row
  I part;   // 0: the whole row; else 1 + the number of the piece among all pieces
};

template <typename I>
__device__ __forceinline__ Item<I> load_item(const Item<I>* from) {
  Item<I> item;
  const int4* raw = reinterpret_cast<const int4*>(from);
#pragma unroll
  for (size_t i = 0; i < sizeof(item) / sizeof(int4); ++i) reinterpret_cast<int4*>(&item)[i] = __ldg(raw + i);
  return item;
}

// The row that holds nonzero k: the last one with indptr[row] <= k, of those from `low` on. Needs 0 <= k < nnz.
template <typename I>
__device__ __forceinline__ int64_t find_row(const I* indptr, int64_t num_rows, int64_t k, int64_t low = 0) {
  int64_t high = num_rows;
  while (high - low > 1) {
    int64_t middle = (low + high) >> 1;
    if (static_cast<int64_t>(__ldg(indptr + middle)) <= k) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

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

constexpr int kMergeThreads = 256;
constexpr int kWarpPieces = 64;  // a row of more is merged by a whole block

// A warp merges the pieces of one row for 32 features (a slice); one of many pieces is left to all warps of the block
// together, each taking every eighth; so are all rows where a block has but one. Job has a State of a feature, which
// starts from `clear`; `read` of a piece's; `add`, that takes in another one; and `write` of a row's. By blocks of
// kMergeThreads.
template <typename I, typename Job>
__device__ __forceinline__ void merge_rows(const Rows<I>& rows, int64_t width, int64_t slice, const Job& job,
                                           typename Job::State (*shared)[32], int rows_of_block = kMergeThreads / 32) {
  using State = typename Job::State;
  constexpr int warps = kMergeThreads / 32;
  const int few = rows_of_block < warps ? 0 : kWarpPieces;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t d = slice * 32 + lane;
  const bool active = d < width;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * rows_of_block;
  auto read = [&](const Pieces<I>& pieces, int64_t from, int64_t step) {
    constexpr int batch = 4;  // on their way before the first is taken in
    State state;
    state.clear();
    for (int64_t j = from; active && j < pieces.count; j += batch * step) {
      State next[batch];
#pragma unroll
      for (int u = 0; u < batch; ++u) {
        next[u].clear();
        if (j + u * step < pieces.count) next[u] = job.read(pieces[j + u * step], d);
      }
#pragma unroll
      for (int u = 0; u < batch; ++u) {
        if (j + u * step < pieces.count) job.add(state, next[u]);
      }
    }
    return state;
  };
  // Looked for once by each warp, not by all warps for each row of the block.
  __shared__ Pieces<I> found[warps];
  if (warp < rows_of_block) {
    const Pieces<I> own = pieces_of(rows, first + warp);
    if (few && active && own.count && own.count <= few) job.write(own, d, read(own, 0, 1));
    if (lane == 0) found[warp] = own;
  }
  __syncthreads();
  for (int row = 0; row < rows_of_block && first + row < rows.num_splits; ++row) {
    const Pieces<I> pieces = found[row];
    if (pieces.count <= few) continue;
    const State mine = read(pieces, warp, warps);
    __syncthreads();  // the row before has been read
    shared[warp][lane] = mine;
    __syncthreads();
    if (warp) continue;
    State state = mine;
    for (int other = 1; other < warps; ++other) job.add(state, shared[other][lane]);
    if (active) job.write(pieces, d, state);
  }
}

}  // namespace cuda
}  // namespace gnnaccel
