// How launchers are bound to Python: from their signatures, which kernels.h alone spells out. Python gives
//   - an address for a pointer, an int for an enum, a number or bool for one;
//   - a Csr or a WorkList, made once for each graph, for one of these; None for no work list, and for a null Csr where
//     there may be none;
//   - a tuple of its members for any other structure, those of a structure among them in a tuple of their own; the
//     empty one if all are zero.
// Every call releases the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace gnnaccel {

// What is given for a parameter of type T, and the parameter made of it.
template <class T, class = void>
struct Argument {
  using Given = T;
  static T of(T given) { return given; }
};
template <class T>
struct Argument<T*> {
  using Given = uintptr_t;
  static T* of(uintptr_t address) { return reinterpret_cast<T*>(address); }
};
template <>
struct Argument<const Csr*> {
  using Given = const Csr*;
  static const Csr* of(const Csr* given) { return given; }
};
template <class T>
struct Argument<T, std::enable_if_t<std::is_enum_v<T>>> {
  using Given = int;
  static T of(int given) { return static_cast<T>(given); }
};
template <>
struct Argument<const WorkList&> {
  using Given = const WorkList*;
  static const WorkList& of(const WorkList* given) {
    static const WorkList none{};
    return given ? *given : none;
  }
};

template <class Result, class... Parameters>
void bind(pybind11::module_& module, const char* name, Result (*launcher)(Parameters...)) {
  module.def(name, [launcher](typename Argument<Parameters>::Given... given) {
    const pybind11::gil_scoped_release unlocked;
    return launcher(Argument<Parameters>::of(given)...);
  });
}

// A class of Python whose objects are made of the members of S, in their order, and cannot be changed.
template <class S, class... Members>
void bind_class(pybind11::module_& module, const char* name) {
  pybind11::class_<S>(module, name).def(pybind11::init([](typename Argument<Members>::Given... given) {
    return S{Argument<Members>::of(given)...};
  }));
}

// What sampling gives: its arrays are buffers of Python, which torch takes as they are.
inline void bind_samples(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<Array, std::shared_ptr<Array>>(module, "Array", py::buffer_protocol())
      .def("__len__", [](const Array& array) { return array.size; })
      .def_buffer([](Array& array) {
        const auto format =
            array.width == 8 ? py::format_descriptor<int64_t>::format() : py::format_descriptor<int32_t>::format();
        return py::buffer_info(array.data, array.width, format, array.size);
      });
  py::class_<Samples>(module, "Samples")
      .def_readonly("nodes", &Samples::nodes)
      .def_readonly("trees", &Samples::trees)
      .def_readonly("rows", &Samples::rows)
      .def_readonly("cols", &Samples::cols)
      .def_readonly("edges", &Samples::edges)
      .def_readonly("nodes_per_hop", &Samples::nodes_per_hop)
      .def_readonly("edges_per_hop", &Samples::edges_per_hop);
}

// A tuple of the members of S.
template <class S, class... Members>
struct TupleCaster {
  PYBIND11_TYPE_CASTER(S, pybind11::detail::const_name("tuple"));

  bool load(pybind11::handle source, bool) {
    if (!PyTuple_Check(source.ptr())) return false;
    const Py_ssize_t size = PyTuple_GET_SIZE(source.ptr());
    if (size == 0) value = S{};
    return size == 0 || (size == sizeof...(Members) && members(source.ptr(), std::index_sequence_for<Members...>{}));
  }

 private:
  template <size_t... K>
  bool members(PyObject* source, std::index_sequence<K...>) {
    std::tuple<pybind11::detail::make_caster<typename Argument<Members>::Given>...> casters;
    if (!(std::get<K>(casters).load(PyTuple_GET_ITEM(source, K), true) && ...)) return false;
    using pybind11::detail::cast_op;
    value = S{Argument<Members>::of(cast_op<typename Argument<Members>::Given>(std::get<K>(casters)))...};
    return true;
  }
};

}  // namespace gnnaccel

namespace pybind11 {
namespace detail {

using Pointer = const void*;

template <>
struct type_caster<gnnaccel::Operand> : gnnaccel::TupleCaster<gnnaccel::Operand, Pointer, int64_t, int64_t> {};
template <>
struct type_caster<gnnaccel::Fused>
    : gnnaccel::TupleCaster<gnnaccel::Fused, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, bool, bool> {};
template <>
struct type_caster<gnnaccel::EdgeFactor> : gnnaccel::TupleCaster<gnnaccel::EdgeFactor, Pointer, Pointer, double> {};
template <>
struct type_caster<gnnaccel::Compressed>
    : gnnaccel::TupleCaster<gnnaccel::Compressed, Pointer, Pointer, int64_t, int64_t> {};
template <>
struct type_caster<gnnaccel::Tiles>
    : gnnaccel::TupleCaster<gnnaccel::Tiles, Pointer, Pointer, Pointer, Pointer, Pointer, int64_t, int64_t, int64_t,
                            int64_t, int64_t, int64_t> {};
template <>
struct type_caster<gnnaccel::DotAttention>
    : gnnaccel::TupleCaster<gnnaccel::DotAttention, Pointer, Pointer, Pointer, Pointer, gnnaccel::EdgeFactor, void*,
                            void*, Pointer, Pointer, void*, void*, void*, void*, double, int64_t, int64_t,
                            gnnaccel::DType> {};
template <>
struct type_caster<gnnaccel::Network>
    : gnnaccel::TupleCaster<gnnaccel::Network, const int64_t*, Pointer, Pointer, const int64_t*, int64_t,
                            gnnaccel::IndexType, gnnaccel::IndexType> {};
template <>
struct type_caster<gnnaccel::Relation>
    : gnnaccel::TupleCaster<gnnaccel::Relation, Pointer, Pointer, Pointer, const int64_t*, int64_t, int64_t, int64_t,
                            int64_t, gnnaccel::DType, std::vector<int64_t>> {};
template <>
struct type_caster<gnnaccel::NodeType>
    : gnnaccel::TupleCaster<gnnaccel::NodeType, Pointer, const int64_t*, int64_t, int64_t, int64_t, int64_t> {};
template <>
struct type_caster<gnnaccel::Draw> : gnnaccel::TupleCaster<gnnaccel::Draw, uint64_t*, const int64_t*, uint64_t, int64_t,
                                                           int64_t, gnnaccel::IndexType, bool, bool, bool, bool> {};
template <>
struct type_caster<gnnaccel::Members>
    : gnnaccel::TupleCaster<gnnaccel::Members, Pointer, const int64_t*, const int64_t*, const int64_t*, int64_t> {};
template <>
struct type_caster<gnnaccel::Cut> : gnnaccel::TupleCaster<gnnaccel::Cut, const int64_t*, const int64_t*, int64_t> {};

}  // namespace detail
}  // namespace pybind11
