// What containers of Python hold, compared with what they held, by identity. No code of Python's runs in here, so that
// an object costs a nanosecond or two, where all(map(operator.is_, ...)) costs 40.
#include "objects.h"

namespace gnnaccel {
namespace {

bool same_entries(PyObject* mapping, PyObject* values, PyObject* keys) {
  if (PyDict_Size(mapping) != PyTuple_GET_SIZE(values)) return false;
  PyObject *key, *value;
  Py_ssize_t position = 0;
  for (Py_ssize_t i = 0; PyDict_Next(mapping, &position, &key, &value); ++i) {
    if (value != PyTuple_GET_ITEM(values, i)) return false;
    if (keys != Py_None && key != PyTuple_GET_ITEM(keys, i)) return false;
  }
  return true;
}

bool same_elements(PyObject* list, PyObject* values) {
  if (PyList_GET_SIZE(list) != PyTuple_GET_SIZE(values)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    if (PyList_GET_ITEM(list, i) != PyTuple_GET_ITEM(values, i)) return false;
  }
  return true;
}

}  // namespace

bool same_objects(const pybind11::list& held) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(held.ptr()); ++i) {
    PyObject* each = PyList_GET_ITEM(held.ptr(), i);
    if (!PyTuple_Check(each) || PyTuple_GET_SIZE(each) != 3) return false;
    PyObject *container = PyTuple_GET_ITEM(each, 0), *values = PyTuple_GET_ITEM(each, 1),
             *keys = PyTuple_GET_ITEM(each, 2);
    if (!PyTuple_Check(values)) return false;
    if (PyDict_Check(container)) {
      if (keys != Py_None && (!PyTuple_Check(keys) || PyTuple_GET_SIZE(keys) != PyTuple_GET_SIZE(values))) return false;
      if (!same_entries(container, values, keys)) return false;
    } else if (!PyList_Check(container) || !same_elements(container, values)) {
      return false;
    }
  }
  return true;
}

}  // namespace gnnaccel
