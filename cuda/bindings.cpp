// The CUDA entries of gnnaccel._C: <name>_cuda with the arguments of the CPU entry of that name, a stream's address in
// place of the thread count, and a work list after the graph where kernels.h has one. Workspaces come from a function
// of Python (use_memory), which is not asked where a kernel wants none.
#include "../cpp/bindings.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "walk_source.h"

namespace pybind11 {
namespace detail {

template <>
struct type_caster<gnnaccel::cuda::SampleNodes>
    : gnnaccel::TupleCaster<gnnaccel::cuda::SampleNodes, Pointer, const int64_t*, void*, void*, void*, void*, int64_t,
                            int64_t, int64_t, int64_t> {};
template <>
struct type_caster<gnnaccel::cuda::SampleEdges>
    : gnnaccel::TupleCaster<gnnaccel::cuda::SampleEdges, Pointer, const int64_t*, void*, void*, void*, int64_t, int64_t,
                            int64_t, gnnaccel::DType> {};
template <>
struct type_caster<gnnaccel::cuda::SampleBatch>
    : gnnaccel::TupleCaster<gnnaccel::cuda::SampleBatch, int64_t*, const int64_t*, int64_t, int64_t,
                            gnnaccel::IndexType> {};
template <>
struct type_caster<gnnaccel::cuda::SampleStep>
    : gnnaccel::TupleCaster<gnnaccel::cuda::SampleStep, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, uint64_t,
                            bool, bool, int64_t*> {};

}  // namespace detail
}  // namespace pybind11

namespace gnnaccel {
namespace cuda {
namespace {

// allocate(bytes): an object that owns memory of the current device and has its address as data_ptr(); a tensor. Never
// freed: Python may be gone before the library is.
PyObject* allocate = nullptr;

// Gives the memory back at the end of a call, when the GIL is held again: in the order of the stream.
class Memory final : public Workspace {
 public:
  void* take(int64_t bytes) override {
    if (bytes == 0) return nullptr;
    const pybind11::gil_scoped_acquire locked;
    owners_.push_back(pybind11::handle(allocate)(bytes));
    return reinterpret_cast<void*>(owners_.back().attr("data_ptr")().cast<uintptr_t>());
  }

 private:
  std::vector<pybind11::object> owners_;
};

void check(cudaError_t status, const std::string& name) {
  if (status == cudaSuccess) return;
  throw std::runtime_error("gnnaccel." + name + ": launch failed: " + cudaGetErrorString(status));
}

template <class... Parameters>
void bind(pybind11::module_& module, const char* name, cudaError_t (*launcher)(Parameters...)) {
  const auto call = [=](typename Argument<Parameters>::Given... given) {
    const pybind11::gil_scoped_release unlocked;
    check(launcher(Argument<Parameters>::of(given)...), name);
  };
  module.def((std::string(name) + "_cuda").c_str(), call);
}

template <class... Parameters>
void bind(pybind11::module_& module, const char* name, cudaError_t (*launcher)(Workspace&, Parameters...)) {
  const auto call = [=](typename Argument<Parameters>::Given... given) {
    Memory memory;
    const pybind11::gil_scoped_release unlocked;
    check(launcher(memory, Argument<Parameters>::of(given)...), name);
  };
  module.def((std::string(name) + "_cuda").c_str(), call);
}

}  // namespace
}  // namespace cuda
}  // namespace gnnaccel

void bind_cuda(pybind11::module_& module) {
  using namespace gnnaccel::cuda;
  const auto add = [&](const char* name, auto* launcher) { gnnaccel::cuda::bind(module, name, launcher); };
  module.def("use_memory", [](pybind11::object function) { allocate = function.release().ptr(); });
  module.attr("WALK_SOURCE") = kWalkSource;
  add("spmm", &spmm);
  add("sddmm", &sddmm);
  add("edge_softmax", &edge_softmax);
  add("edge_softmax_backward", &edge_softmax_backward);
  add("segment_softmax", &segment_softmax);
  add("segment_softmax_backward", &segment_softmax_backward);
  add("attention", &attention);
  add("attention_backward", &attention_backward);
  add("dot_attention", &dot_attention);
  add("dot_attention_ends", &dot_attention_ends);
  add("edge_factor", &edge_factor);
  add("gatv2_scores", &gatv2_scores);
  add("gatv2_sums", &gatv2_sums);
  add("head_dots", &head_dots);
  add("head_dots_backward", &head_dots_backward);
  add("add_bias", &add_bias);
  add("column_sums", &column_sums);
  add("segment_matmul", &segment_matmul);
  add("segment_matmul_weights", &segment_matmul_weights);
  add("linear", &linear);
  add("linear_weights", &linear_weights);
  add("normed_layers", &normed_layers);
  add("normed_layers_backward", &normed_layers_backward);
  add("scatter_arg", &scatter_arg);
  add("edge_order", &edge_order);
  add("coo_in_order", &coo_in_order);
  add("coo_to_csr", &coo_to_csr);
  add("transpose", &transpose);
  add("spmm_transposed", &spmm_transposed);
  add("translate_columns", &translate_columns);
  add("translate_blocks", &translate_blocks);
  add("spmm_tiled", &spmm_tiled);
  add("sddmm_tiled", &sddmm_tiled);
  add("maxk", &maxk);
  add("expand", &expand);
  add("collect", &collect);
  add("spgemm", &spgemm);
  add("sspmm", &sspmm);
  add("sample_seeds", &sample_seeds);
  add("sample_table", &sample_table);
  add("sample_degrees", &sample_degrees);
  add("sample_edges", &sample_edges);
  add("sample_steps", &sample_steps);
}
