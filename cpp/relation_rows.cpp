// Edges by relation and, in it, by destination: a counting sort, which leaves the edges of a destination together.
#include <algorithm>
#include <vector>

#include "kernels.h"

namespace gnnaccel {
namespace {

template <class I, class T>
int64_t sort(const Csr& graph, const T* types, int64_t relations, I* far, int64_t* edges, I* ends, I* bounds,
             int64_t* ptr, int64_t* sizes) {
  const auto* indptr = static_cast<const I*>(graph.indptr);
  const auto* indices = static_cast<const I*>(graph.indices);
  const auto* ids = static_cast<const I*>(graph.edge_ids);
  // What each relation's last edge had for a row, and where its next edge and its next row go.
  std::vector<int64_t> last(relations, -1), edge_at(relations + 1, 0), row_at(relations + 1, 0);
  const auto each = [&](auto edge) {
    for (int64_t row = 0; row < graph.num_rows; ++row)
      for (int64_t k = indptr[row]; k < indptr[row + 1]; ++k) {
        const int64_t id = ids ? ids[k] : k;
        const int64_t type = types[id];
        edge(row, k, id, type, last[type] != row);
        last[type] = row;
      }
  };
  each([&](int64_t, int64_t, int64_t, int64_t type, bool begins) {
    ++edge_at[type + 1];
    row_at[type + 1] += begins;
  });
  for (int64_t type = 0; type < relations; ++type) {
    edge_at[type + 1] += edge_at[type];
    row_at[type + 1] += row_at[type];
  }
  std::copy(row_at.begin(), row_at.end(), ptr);
  std::fill(last.begin(), last.end(), -1);
  each([&](int64_t row, int64_t k, int64_t id, int64_t type, bool begins) {
    const int64_t place = edge_at[type]++;
    far[place] = indices[k];
    edges[place] = id;
    if (!begins) return;
    const int64_t own = row_at[type]++;
    ends[own] = static_cast<I>(row);
    bounds[own] = static_cast<I>(place);
  });
  const int64_t count = ptr[relations];
  bounds[count] = static_cast<I>(graph.nnz);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t place = bounds[row]; place < bounds[row + 1]; ++place)
      sizes[edges[place]] = bounds[row + 1] - bounds[row];
  return count;
}

template <class I>
int64_t sort_into(const Csr& graph, const void* types, int64_t relations, IndexType type_type, void* far,
                  int64_t* edges, void* ends, void* bounds, int64_t* ptr, int64_t* sizes) {
  auto* to = static_cast<I*>(far);
  auto *rows = static_cast<I*>(ends), *offsets = static_cast<I*>(bounds);
  if (type_type == IndexType::i64)
    return sort(graph, static_cast<const int64_t*>(types), relations, to, edges, rows, offsets, ptr, sizes);
  return sort(graph, static_cast<const int32_t*>(types), relations, to, edges, rows, offsets, ptr, sizes);
}

}  // namespace

int64_t relation_rows(const Csr& graph, const void* types, int64_t relations, IndexType type_type, void* far,
                      int64_t* edges, void* ends, void* bounds, int64_t* ptr, int64_t* sizes, int /*threads*/) {
  const auto make = graph.index_type == IndexType::i64 ? sort_into<int64_t> : sort_into<int32_t>;
  return make(graph, types, relations, type_type, far, edges, ends, bounds, ptr, sizes);
}

}  // namespace gnnaccel
