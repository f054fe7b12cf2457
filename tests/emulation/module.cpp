// The CUDA entries of gnnaccel._C, emulated: they take addresses in host memory.
#include <pybind11/pybind11.h>

void bind_cuda(pybind11::module_& module);

PYBIND11_MODULE(_emulated, module) { bind_cuda(module); }
