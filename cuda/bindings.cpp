// The CUDA entries of gnnaccel._C: <name>_cuda with the arguments of the CPU entry of that name, a stream's
// address in place of the thread count. An entry that needs scratch memory has a <name>_cuda_workspace_bytes of
// the same arguments, and takes the workspace's address and size before the stream.
#include "../cpp/bindings.h"

#include <stdexcept>
#include <string>

#include "kernels.h"

namespace {

using namespace gnnaccel;

cudaStream_t on(Address stream) { return at<CUstream_st>(stream); }

void check(cudaError_t status, const char* name) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string("gnnaccel.") + name + ": launch failed: " + cudaGetErrorString(status));
}

// A work list of (items, steps, splits, num_items, num_parts, num_splits, clustered, wish, lanes, workers); empty:
// none.
cuda::WorkList work_list(const pybind11::tuple& given) {
  if (given.empty()) return {};
  auto address = [&](int i) { return at(given[i].cast<Address>()); };
  auto size = [&](int i) { return given[i].cast<int64_t>(); };
  return {address(0),
          address(1),
          address(2),
          size(3),
          size(4),
          size(5),
          given[6].cast<bool>(),
          static_cast<cuda::Wish>(given[7].cast<int>()),
          given[8].cast<int>(),
          given[9].cast<int>()};
}

int64_t spmm_workspace_bytes(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols,
                             int64_t nnz, int index_type, const pybind11::tuple& work, Address lhs, int64_t lhs_len,
                             int64_t lhs_div, Address rhs, int64_t rhs_len, int64_t rhs_div, Address out, Address,
                             Address, int64_t num_feats, int message, int reduce, int dtype, double,
                             const pybind11::tuple& around) {
  return cuda::spmm_workspace_bytes(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type),
                                    work_list(work), {at(lhs), lhs_len, lhs_div}, {at(rhs), rhs_len, rhs_div}, at(out),
                                    num_feats, static_cast<Message>(message), static_cast<Reduce>(reduce),
                                    static_cast<DType>(dtype), fused(around));
}

void spmm(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
          int index_type, const pybind11::tuple& work, Address lhs, int64_t lhs_len, int64_t lhs_div, Address rhs,
          int64_t rhs_len, int64_t rhs_div, Address out, Address arg_lhs, Address arg_rhs, int64_t num_feats,
          int message, int reduce, int dtype, double empty_value, const pybind11::tuple& around, Address workspace,
          int64_t workspace_bytes, Address stream) {
  const cuda::WorkList list = work_list(work);
  const Fused given = fused(around);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::spmm(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), list,
                   {at(lhs), lhs_len, lhs_div}, {at(rhs), rhs_len, rhs_div}, at(out), at(arg_lhs), at(arg_rhs),
                   num_feats, static_cast<Message>(message), static_cast<Reduce>(reduce), static_cast<DType>(dtype),
                   empty_value, given, at(workspace), workspace_bytes, on(stream)),
        "spmm");
}

void sddmm(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
           int index_type, const pybind11::tuple& work, Address lhs, int64_t lhs_len, int64_t lhs_div, int lhs_target,
           Address rhs, int64_t rhs_len, int64_t rhs_div, int rhs_target, Address out, int64_t num_feats,
           int64_t dot_len, int op, int dtype, Address stream) {
  const cuda::WorkList list = work_list(work);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::sddmm(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), list,
                    {at(lhs), lhs_len, lhs_div}, static_cast<Target>(lhs_target), {at(rhs), rhs_len, rhs_div},
                    static_cast<Target>(rhs_target), at(out), num_feats, dot_len, static_cast<EdgeOp>(op),
                    static_cast<DType>(dtype), on(stream)),
        "sddmm");
}

void edge_softmax(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                  int index_type, Address scores, Address out, int64_t num_heads, int dtype, Address stream) {
  check(cuda::edge_softmax(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at(scores), at(out),
                           num_heads, static_cast<DType>(dtype), on(stream)),
        "edge_softmax");
}

void edge_softmax_backward(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols,
                           int64_t nnz, int index_type, Address out, Address grad_out, Address grad_scores,
                           int64_t num_heads, int dtype, Address stream) {
  check(cuda::edge_softmax_backward(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at(out),
                                    at(grad_out), at(grad_scores), num_heads, static_cast<DType>(dtype), on(stream)),
        "edge_softmax_backward");
}

int64_t attention_workspace_bytes(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols,
                                  int64_t nnz, int index_type, const pybind11::tuple& work, Address, Address, Address,
                                  Address, Address, double, Address, Address, Address out_pos, Address, double,
                                  int64_t num_heads, int64_t width, int dtype) {
  return cuda::attention_workspace_bytes(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type),
                                         work_list(work), num_heads, width, static_cast<DType>(dtype), out_pos != 0);
}

void attention(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
               int index_type, const pybind11::tuple& work, Address x, Address score_src, Address score_dst,
               Address edge_scale, Address seed, double dropout, Address out, Address lse, Address out_pos,
               Address p_pos, double slope, int64_t num_heads, int64_t width, int dtype, Address workspace,
               int64_t workspace_bytes, Address stream) {
  const cuda::WorkList list = work_list(work);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::attention(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), list, at(x), at(score_src),
                        at(score_dst), {at(edge_scale), at(seed), dropout}, at(out), at(lse), at(out_pos), at(p_pos),
                        slope, num_heads, width, static_cast<DType>(dtype), at(workspace), workspace_bytes, on(stream)),
        "attention");
}

int64_t attention_backward_workspace_bytes(Address t_indptr, Address t_indices, Address t_edge_ids, int64_t t_num_rows,
                                           int64_t t_num_cols, int64_t nnz, int index_type, const pybind11::tuple& work,
                                           Address, Address, Address, Address, Address, double, Address, Address,
                                           Address, Address, Address, Address, Address, Address, double,
                                           int64_t num_heads, int64_t width, int dtype) {
  return cuda::attention_backward_workspace_bytes(
      csr(t_indptr, t_indices, t_edge_ids, t_num_rows, t_num_cols, nnz, index_type), work_list(work), num_heads, width,
      static_cast<DType>(dtype));
}

void attention_backward(Address t_indptr, Address t_indices, Address t_edge_ids, int64_t t_num_rows, int64_t t_num_cols,
                        int64_t nnz, int index_type, const pybind11::tuple& work, Address x, Address score_src,
                        Address score_dst, Address edge_scale, Address seed, double dropout, Address out, Address lse,
                        Address out_pos, Address p_pos, Address grad_out, Address grad_x, Address grad_score_src,
                        Address grad_score_dst, double slope, int64_t num_heads, int64_t width, int dtype,
                        Address workspace, int64_t workspace_bytes, Address stream) {
  const cuda::WorkList list = work_list(work);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::attention_backward(csr(t_indptr, t_indices, t_edge_ids, t_num_rows, t_num_cols, nnz, index_type), list,
                                 at(x), at(score_src), at(score_dst), {at(edge_scale), at(seed), dropout}, at(out),
                                 at(lse), at(out_pos), at(p_pos), at(grad_out), at(grad_x), at(grad_score_src),
                                 at(grad_score_dst), slope, num_heads, width, static_cast<DType>(dtype), at(workspace),
                                 workspace_bytes, on(stream)),
        "attention_backward");
}

int64_t dot_attention_workspace_bytes(Address indptr, Address indices, Address edge_ids, int64_t num_rows,
                                      int64_t num_cols, int64_t nnz, int index_type, const pybind11::tuple& work,
                                      const pybind11::tuple& given) {
  return cuda::dot_attention_workspace_bytes(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type),
                                             work_list(work), dot_attention_of(given));
}

void dot_attention(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                   int index_type, const pybind11::tuple& work, const pybind11::tuple& given, Address workspace,
                   int64_t workspace_bytes, Address stream) {
  const cuda::WorkList list = work_list(work);
  const DotAttention all = dot_attention_of(given);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::dot_attention(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), list, all,
                            at(workspace), workspace_bytes, on(stream)),
        "dot_attention");
}

void dot_attention_ends(Address out, Address stats, Address grad_out, Address ends, int64_t num_rows, int64_t num_heads,
                        int64_t width, int dtype, Address stream) {
  check(cuda::dot_attention_ends(at(out), at(stats), at(grad_out), at(ends), num_rows, num_heads, width,
                                 static_cast<DType>(dtype), on(stream)),
        "dot_attention_ends");
}

void edge_factor(Address edge_scale, Address seed, double dropout, Address out, int64_t count, int dtype,
                 Address stream) {
  check(cuda::edge_factor({at(edge_scale), at(seed), dropout}, at(out), count, static_cast<DType>(dtype), on(stream)),
        "edge_factor");
}

void gatv2_scores(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                  int index_type, const pybind11::tuple& work, Address x, Address y, Address vectors, Address out,
                  double slope, int64_t num_heads, int64_t width, int dtype, Address stream) {
  const cuda::WorkList list = work_list(work);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::gatv2_scores(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), list, at(x), at(y),
                           at(vectors), at(out), slope, num_heads, width, static_cast<DType>(dtype), on(stream)),
        "gatv2_scores");
}

int64_t gatv2_sums_workspace_bytes(Address indptr, Address indices, Address edge_ids, int64_t num_rows,
                                   int64_t num_cols, int64_t nnz, int index_type, const pybind11::tuple& work, Address,
                                   Address, Address, Address, Address, Address products, double, int64_t, int64_t width,
                                   int dtype) {
  return cuda::gatv2_sums_workspace_bytes(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type),
                                          work_list(work), width, static_cast<DType>(dtype), products != 0);
}

void gatv2_sums(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                int index_type, const pybind11::tuple& work, Address x, Address y, Address vectors, Address weights,
                Address sums, Address products, double slope, int64_t num_heads, int64_t width, int dtype,
                Address workspace, int64_t workspace_bytes, Address stream) {
  const cuda::WorkList list = work_list(work);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::gatv2_sums(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), list, at(x), at(y),
                         at(vectors), at(weights), at(sums), at(products), slope, num_heads, width,
                         static_cast<DType>(dtype), at(workspace), workspace_bytes, on(stream)),
        "gatv2_sums");
}

void head_dots(Address x, Address vectors, Address out, int64_t num_rows, int64_t num_vectors, int64_t num_heads,
               int64_t width, int dtype, Address stream) {
  check(cuda::head_dots(at(x), at(vectors), at(out), num_rows, num_vectors, num_heads, width, static_cast<DType>(dtype),
                        on(stream)),
        "head_dots");
}

int64_t head_dots_backward_workspace_bytes(Address, Address, Address, Address, Address, int64_t num_rows,
                                           int64_t num_vectors, int64_t, int64_t width, int dtype) {
  return cuda::head_dots_backward_workspace_bytes(num_rows, num_vectors, width, static_cast<DType>(dtype));
}

void head_dots_backward(Address x, Address vectors, Address grad_out, Address grad_x, Address grad_vectors,
                        int64_t num_rows, int64_t num_vectors, int64_t num_heads, int64_t width, int dtype,
                        Address workspace, int64_t workspace_bytes, Address stream) {
  check(
      cuda::head_dots_backward(at(x), at(vectors), at(grad_out), at(grad_x), at(grad_vectors), num_rows, num_vectors,
                               num_heads, width, static_cast<DType>(dtype), at(workspace), workspace_bytes, on(stream)),
      "head_dots_backward");
}

void scatter_arg(Address arg, Address values, Address target, int64_t num_rows, int64_t num_feats, int64_t len,
                 int64_t div, bool rows_disjoint, int index_type, int dtype, Address stream) {
  check(cuda::scatter_arg(at(arg), at(values), at(target), num_rows, num_feats, len, div, rows_disjoint,
                          static_cast<IndexType>(index_type), static_cast<DType>(dtype), on(stream)),
        "scatter_arg");
}

void edge_order(Address edge_ids, Address in, Address out, int64_t num_edges, int64_t edge_bytes, bool by_id,
                int index_type, Address stream) {
  check(cuda::edge_order(at(edge_ids), at(in), at(out), num_edges, edge_bytes, by_id,
                         static_cast<IndexType>(index_type), on(stream)),
        "edge_order");
}

void coo_in_order(Address rows, Address cols, int64_t nnz, int64_t num_rows, int64_t num_cols, int in_type,
                  Address indptr, Address indices, int out_type, Address state, Address stream) {
  check(cuda::coo_in_order(at(rows), at(cols), nnz, num_rows, num_cols, static_cast<IndexType>(in_type), at(indptr),
                           at(indices), static_cast<IndexType>(out_type), at(state), on(stream)),
        "coo_in_order");
}

int64_t coo_to_csr_workspace_bytes(Address, Address, int64_t nnz, int64_t num_rows, int64_t, int, Address, Address,
                                   Address, int out_type) {
  return cuda::coo_to_csr_workspace_bytes(nnz, num_rows, static_cast<IndexType>(out_type));
}

void coo_to_csr(Address rows, Address cols, int64_t nnz, int64_t num_rows, int64_t num_cols, int in_type,
                Address indptr, Address indices, Address edge_ids, int out_type, Address workspace,
                int64_t workspace_bytes, Address stream) {
  check(cuda::coo_to_csr(at(rows), at(cols), nnz, num_rows, num_cols, static_cast<IndexType>(in_type), at(indptr),
                         at(indices), at(edge_ids), static_cast<IndexType>(out_type), at(workspace), workspace_bytes,
                         on(stream)),
        "coo_to_csr");
}

int64_t translate_columns_workspace_bytes(Address indptr, Address indices, Address edge_ids, int64_t num_rows,
                                          int64_t num_cols, int64_t nnz, int index_type, int64_t height, Address,
                                          Address) {
  return cuda::translate_columns_workspace_bytes(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type),
                                                 height);
}

void translate_columns(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols,
                       int64_t nnz, int index_type, int64_t height, Address columns, Address window_columns,
                       Address workspace, int64_t workspace_bytes, Address stream) {
  check(cuda::translate_columns(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), height,
                                at(columns), at(window_columns), at(workspace), workspace_bytes, on(stream)),
        "translate_columns");
}

int64_t translate_blocks_workspace_bytes(Address indptr, Address indices, Address edge_ids, int64_t num_rows,
                                         int64_t num_cols, int64_t nnz, int index_type, Address,
                                         const pybind11::tuple& tiles) {
  return cuda::translate_blocks_workspace_bytes(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type),
                                                tiles_of(tiles));
}

void translate_blocks(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols,
                      int64_t nnz, int index_type, Address columns, const pybind11::tuple& tiles, Address workspace,
                      int64_t workspace_bytes, Address stream) {
  check(cuda::translate_blocks(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at(columns),
                               tiles_of(tiles), at(workspace), workspace_bytes, on(stream)),
        "translate_blocks");
}

int64_t spmm_tiled_workspace_bytes(Address indptr, Address indices, Address edge_ids, int64_t num_rows,
                                   int64_t num_cols, int64_t nnz, int index_type, const pybind11::tuple& tiles, Address,
                                   Address, Address, int64_t num_feats, bool, bool, int) {
  return cuda::spmm_tiled_workspace_bytes(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type),
                                          tiles_of(tiles), num_feats);
}

void spmm_tiled(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                int index_type, const pybind11::tuple& tiles, Address x, Address weight, Address out, int64_t num_feats,
                bool mean, bool fast, int dtype, Address workspace, int64_t workspace_bytes, Address stream) {
  const Tiles all = tiles_of(tiles);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::spmm_tiled(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), all, at(x), at(weight),
                         at(out), num_feats, mean, fast, static_cast<DType>(dtype), at(workspace), workspace_bytes,
                         on(stream)),
        "spmm_tiled");
}

void sddmm_tiled(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                 int index_type, const pybind11::tuple& tiles, Address x, Address y, Address out, int64_t num_heads,
                 int64_t len, bool fast, int dtype, Address stream) {
  const Tiles all = tiles_of(tiles);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::sddmm_tiled(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), all, at(x), at(y),
                          at(out), num_heads, len, fast, static_cast<DType>(dtype), on(stream)),
        "sddmm_tiled");
}

void maxk(Address x, int64_t num_rows, const pybind11::tuple& kept, int dtype, Address stream) {
  const Compressed all = compressed_of(kept);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::maxk(at(x), num_rows, all, static_cast<DType>(dtype), on(stream)), "maxk");
}

void expand(const pybind11::tuple& x, int64_t num_rows, Address out, int dtype, Address stream) {
  const Compressed all = compressed_of(x);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::expand(all, num_rows, at(out), static_cast<DType>(dtype), on(stream)), "expand");
}

void collect(Address x, int64_t num_rows, const pybind11::tuple& kept, int dtype, Address stream) {
  const Compressed all = compressed_of(kept);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::collect(at(x), num_rows, all, static_cast<DType>(dtype), on(stream)), "collect");
}

int64_t spgemm_workspace_bytes(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols,
                               int64_t nnz, int index_type, const pybind11::tuple& work, const pybind11::tuple& x,
                               Address, Address, int dtype, const pybind11::tuple&) {
  return cuda::spgemm_workspace_bytes(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type),
                                      work_list(work), compressed_of(x), static_cast<DType>(dtype));
}

void spgemm(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
            int index_type, const pybind11::tuple& work, const pybind11::tuple& x, Address weight, Address out,
            int dtype, const pybind11::tuple& around, Address workspace, int64_t workspace_bytes, Address stream) {
  const cuda::WorkList list = work_list(work);
  const Compressed all = compressed_of(x);
  const Fused given = fused(around);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::spgemm(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), list, all, at(weight),
                     at(out), static_cast<DType>(dtype), given, at(workspace), workspace_bytes, on(stream)),
        "spgemm");
}

int64_t sspmm_workspace_bytes(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols,
                              int64_t nnz, int index_type, const pybind11::tuple& work, Address,
                              const pybind11::tuple& kept, Address, Address, Address, bool by_source, int dtype) {
  return cuda::sspmm_workspace_bytes(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type),
                                     work_list(work), compressed_of(kept), by_source, static_cast<DType>(dtype));
}

void sspmm(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
           int index_type, const pybind11::tuple& work, Address grad, const pybind11::tuple& kept, Address weight,
           Address row_scale, Address grad_values, bool by_source, int dtype, Address workspace,
           int64_t workspace_bytes, Address stream) {
  const cuda::WorkList list = work_list(work);
  const Compressed all = compressed_of(kept);
  const pybind11::gil_scoped_release unlocked;
  check(cuda::sspmm(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), list, at(grad), all,
                    at(weight), at(row_scale), at(grad_values), by_source, static_cast<DType>(dtype), at(workspace),
                    workspace_bytes, on(stream)),
        "sspmm");
}

int64_t transpose_workspace_bytes(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols,
                                  int64_t nnz, int index_type, Address, Address, Address) {
  return cuda::transpose_workspace_bytes(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type));
}

void transpose(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
               int index_type, Address t_indptr, Address t_indices, Address t_edge_ids, Address workspace,
               int64_t workspace_bytes, Address stream) {
  check(cuda::transpose(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at(t_indptr),
                        at(t_indices), at(t_edge_ids), at(workspace), workspace_bytes, on(stream)),
        "transpose");
}

}  // namespace

void bind_cuda(pybind11::module_& module) {
  using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("spmm_cuda_workspace_bytes", &spmm_workspace_bytes);
  module.def("spmm_cuda", &spmm);  // what takes a work list unlocks once it has read it
  module.def("sddmm_cuda", &sddmm);
  module.def("edge_softmax_cuda", &edge_softmax, Unlocked());
  module.def("edge_softmax_backward_cuda", &edge_softmax_backward, Unlocked());
  module.def("attention_cuda", &attention);
  module.def("attention_cuda_workspace_bytes", &attention_workspace_bytes);
  module.def("attention_backward_cuda", &attention_backward);
  module.def("attention_backward_cuda_workspace_bytes", &attention_backward_workspace_bytes);
  module.def("dot_attention_cuda", &dot_attention);
  module.def("dot_attention_cuda_workspace_bytes", &dot_attention_workspace_bytes);
  module.def("dot_attention_ends_cuda", &dot_attention_ends, Unlocked());
  module.def("edge_factor_cuda", &edge_factor, Unlocked());
  module.def("gatv2_scores_cuda", &gatv2_scores);
  module.def("gatv2_sums_cuda", &gatv2_sums);
  module.def("gatv2_sums_cuda_workspace_bytes", &gatv2_sums_workspace_bytes);
  module.def("head_dots_cuda", &head_dots, Unlocked());
  module.def("head_dots_backward_cuda", &head_dots_backward, Unlocked());
  module.def("head_dots_backward_cuda_workspace_bytes", &head_dots_backward_workspace_bytes);
  module.def("scatter_arg_cuda", &scatter_arg, Unlocked());
  module.def("edge_order_cuda", &edge_order, Unlocked());
  module.def("coo_in_order_cuda", &coo_in_order, Unlocked());
  module.def("coo_to_csr_cuda_workspace_bytes", &coo_to_csr_workspace_bytes);
  module.def("coo_to_csr_cuda", &coo_to_csr, Unlocked());
  module.def("transpose_cuda_workspace_bytes", &transpose_workspace_bytes);
  module.def("translate_columns_cuda", &translate_columns, Unlocked());
  module.def("translate_columns_cuda_workspace_bytes", &translate_columns_workspace_bytes);
  module.def("translate_blocks_cuda", &translate_blocks);
  module.def("translate_blocks_cuda_workspace_bytes", &translate_blocks_workspace_bytes);
  module.def("spmm_tiled_cuda", &spmm_tiled);
  module.def("spmm_tiled_cuda_workspace_bytes", &spmm_tiled_workspace_bytes);
  module.def("sddmm_tiled_cuda", &sddmm_tiled);
  module.def("transpose_cuda", &transpose, Unlocked());
  module.def("maxk_cuda", &maxk);
  module.def("expand_cuda", &expand);
  module.def("collect_cuda", &collect);
  module.def("spgemm_cuda", &spgemm);
  module.def("spgemm_cuda_workspace_bytes", &spgemm_workspace_bytes);
  module.def("sspmm_cuda", &sspmm);
  module.def("sspmm_cuda_workspace_bytes", &sspmm_workspace_bytes);
}
