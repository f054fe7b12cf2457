// The Python module gnnaccel._C: what kernels.h declares, under the same names; nothing of torch.
#include "bindings.h"

#include "dispatch.h"
#include "objects.h"
#include "parallel.h"

#ifdef GNNACCEL_WITH_CUDA
void bind_cuda(pybind11::module_& module);
#endif

PYBIND11_MODULE(_C, module) {
  using namespace gnnaccel;
  const auto add = [&](const char* name, auto* launcher) { bind(module, name, launcher); };
  bind_class<Csr, const void*, const void*, const void*, int64_t, int64_t, int64_t, IndexType, int64_t>(module, "Csr");
  bind_class<WorkList, const void*, const void*, const void*, int64_t, int64_t, int64_t, bool, SpmmKernel, int, int,
             int64_t>(module, "WorkList");
  bind_class<MessageProgram, const MessageStep*, const MessageLeaf*, const MessageOutput*, int64_t, int64_t, int64_t,
             int64_t, int64_t, int64_t, int64_t, DType>(module, "MessageProgram");
  add("isa", &isa);
  add("is_amd", &is_amd);
  add("use_openmp", &use_openmp);
  add("spmm", &spmm);
  add("spmm_backward", &spmm_backward);
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
  add("normed_layers", &normed_layers);
  add("normed_layers_backward", &normed_layers_backward);
  add("maxk", &maxk);
  add("spgemm", &spgemm);
  add("sspmm", &sspmm);
  add("translate_columns", &translate_columns);
  add("translate_blocks", &translate_blocks);
  add("spmm_tiled", &spmm_tiled);
  add("sddmm_tiled", &sddmm_tiled);
  add("message_walk", &message_walk);
  add("expand", &expand);
  add("collect", &collect);
  add("scatter_arg", &scatter_arg);
  add("edge_order", &edge_order);
  add("coo_to_csr", &coo_to_csr);
  add("coo_to_looped_csr", &coo_to_looped_csr);
  add("transpose", &transpose);
  add("spmm_transposed", &spmm_transposed);
  add("inverse_roots", &inverse_roots);
  add("relation_rows", &relation_rows);
  add("edge_skew", &edge_skew);
  add("network_degrees", &network_degrees);
  add("network_edges", &network_edges);
  add("community_moves", &community_moves);
  add("community_degrees", &community_degrees);
  add("community_edges", &community_edges);
  add("part_sweeps", &part_sweeps);
  add("part_halo_moves", &part_halo_moves);
  add("part_growth", &part_growth);
  module.def("same_objects", &same_objects);
  bind_samples(module);
  add("neighbor_sample", &neighbor_sample);
  add("layer_sample", &layer_sample);
  add("induced_subgraph", &induced_subgraph);
#ifdef GNNACCEL_WITH_CUDA
  module.attr("HAS_CUDA") = true;
  bind_cuda(module);
#else
  module.attr("HAS_CUDA") = false;
#endif
}
