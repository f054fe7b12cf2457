// What the Python modules of both halves take apart: addresses, and structures spelled out.
#pragma once

#include <pybind11/pybind11.h>

#include "types.h"

namespace gnnaccel {

using Address = uintptr_t;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline Csr csr(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
               int index_type) {
  return {at(indptr), at(indices), at(edge_ids), num_rows, num_cols, nnz, static_cast<IndexType>(index_type)};
}

// (source_scale, source_indptr, row_scale, bias, relu); empty: nothing is fused.
inline Fused fused(const pybind11::tuple& given) {
  if (given.empty()) return {};
  auto address = [&](int i) { return at(given[i].cast<Address>()); };
  return {address(0), address(1), address(2), address(3), given[4].cast<bool>()};
}

// The members of Tiles in their order.
inline Tiles tiles_of(const pybind11::tuple& given) {
  auto address = [&](int i) { return at(given[i].cast<Address>()); };
  auto size = [&](int i) { return given[i].cast<int64_t>(); };
  return {address(0), address(1), address(2), address(3), address(4), size(5),
          size(6),    size(7),    size(8),    size(9),    size(10)};
}

// (values, places, k, num_feats).
inline Compressed compressed_of(const pybind11::tuple& given) {
  auto address = [&](int i) { return at(given[i].cast<Address>()); };
  return {address(0), address(1), given[2].cast<int64_t>(), given[3].cast<int64_t>()};
}

// The members of a DotAttention in their order, those of its EdgeFactor among them.
inline DotAttention dot_attention_of(const pybind11::tuple& given) {
  auto address = [&](int i) { return at(given[i].cast<Address>()); };
  auto size = [&](int i) { return given[i].cast<int64_t>(); };
  return {address(0),
          address(1),
          address(2),
          address(3),
          {address(4), address(5), given[6].cast<double>()},
          address(7),
          address(8),
          address(9),
          address(10),
          address(11),
          address(12),
          address(13),
          address(14),
          given[15].cast<double>(),
          size(16),
          size(17),
          static_cast<DType>(given[18].cast<int>())};
}

}  // namespace gnnaccel
