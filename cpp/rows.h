// Walking a CSR matrix in tasks of equal cost.
#pragma once

#include <new>

#include "parallel.h"
#include "types.h"

namespace gnnaccel {
namespace {

// Nonzeros to one f32 accumulator: a longer row is summed in pieces, or a hub's sum would lose digits.
constexpr int64_t kPiece = 1024;
// The same where a piece takes no memory of its own.
constexpr int64_t kShortPiece = 512;
// Pieces to one f32 accumulator.
constexpr int64_t kMany = 64;
// The pieces of a row longer than this run in parallel, so that one hub does not hold a thread.
constexpr int64_t kHubRow = 16384;
// Nonzeros between asking for a gathered row and reading it; measured on Zen 3 and Ice Lake: 4 to 16 are within 5 %.
constexpr int64_t kPrefetchAhead = 8;

template <class I>
struct CsrOf {
  const I* indptr;
  const I* indices;
  const I* edge_ids;
  int64_t num_rows;
  int64_t nnz;

  explicit CsrOf(const Csr& g)
      : indptr(static_cast<const I*>(g.indptr)),
        indices(static_cast<const I*>(g.indices)),
        edge_ids(static_cast<const I*>(g.edge_ids)),
        num_rows(g.num_rows),
        nnz(g.nnz) {}

  int64_t edge(int64_t k) const { return edge_ids ? static_cast<int64_t>(edge_ids[k]) : k; }
};

// First row whose cost before it, indptr[r] + r, is at least `cost`: rows count as one nonzero each, so that
// many empty rows weigh too.
template <class I>
int64_t row_at_cost(const CsrOf<I>& g, int64_t cost) {
  int64_t low = 0, high = g.num_rows;
  while (low < high) {
    const int64_t mid = (low + high) / 2;
    if (static_cast<int64_t>(g.indptr[mid]) + mid < cost)
      low = mid + 1;
    else
      high = mid;
  }
  return low;
}

// Row that holds nonzero k (the last row starting at or before k that is not empty).
template <class I>
int64_t row_of(const CsrOf<I>& g, int64_t k) {
  int64_t low = 0, high = g.num_rows;
  while (low < high) {
    const int64_t mid = (low + high) / 2;
    if (static_cast<int64_t>(g.indptr[mid + 1]) <= k)
      low = mid + 1;
    else
      high = mid;
  }
  return low;
}

// body(first_row, last_row) over consecutive ranges of about equal cost, several per thread so that one
// range of slow rows does not hold the rest up.
template <class I, class Body>
void for_row_ranges(const CsrOf<I>& g, int threads, const Body& body) {
  const int64_t tasks = threads <= 1 ? 1 : threads * int64_t{32};
  const int64_t cost = g.nnz + g.num_rows;
  parallel_for(tasks, threads, [&](int64_t t) {
    const int64_t first = t == 0 ? 0 : row_at_cost(g, cost * t / tasks);
    const int64_t last = t + 1 == tasks ? g.num_rows : row_at_cost(g, cost * (t + 1) / tasks);
    if (first < last) body(first, last);
  });
}

// Asks for the cache lines of `kBytes` at `from`. Inlined by force: GCC 12 takes a function that only
// prefetches for one without effect and deletes the calls.
template <int kBytes>
[[gnu::always_inline]] inline void prefetch(const void* from) {
#pragma GCC unroll 8
  for (int b = 0; b < kBytes; b += 64) __builtin_prefetch(static_cast<const char*>(from) + b);
}

// A plain buffer; std::vector's members would be shared between instruction sets (see parallel.h).
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(size ? static_cast<T*>(::operator new(sizeof(T) * size)) : nullptr) {}
  ~Buffer() { ::operator delete(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_;
};

}  // namespace
}  // namespace gnnaccel
