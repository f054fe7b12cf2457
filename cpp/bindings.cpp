// The Python module gnnaccel._C: addresses, sizes and enum values in, nothing of torch. Every call releases
// the GIL. Argument orders are those of kernels.h with structures spelled out (Csr: indptr, indices,
// edge_ids, num_rows, num_cols, nnz, index_type; Operand: data, len, div; Fused, Compressed: tuples).
#include "bindings.h"

#include "dispatch.h"
#include "kernels.h"
#include "parallel.h"

#ifdef GNNACCEL_WITH_CUDA
void bind_cuda(pybind11::module_& module);
#endif

namespace {

using gnnaccel::Address;
using gnnaccel::at;
using gnnaccel::csr;

void spmm(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
          int index_type, Address out_rows, Address lhs, int64_t lhs_len, int64_t lhs_div, Address rhs, int64_t rhs_len,
          int64_t rhs_div, Address out, Address arg_lhs, Address arg_rhs, int64_t num_feats, int message, int reduce,
          int dtype, double empty_value, const pybind11::tuple& around, int threads) {
  const gnnaccel::Fused given = gnnaccel::fused(around);
  const pybind11::gil_scoped_release unlocked;
  gnnaccel::spmm(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at(out_rows),
                 {at(lhs), lhs_len, lhs_div}, {at(rhs), rhs_len, rhs_div}, at(out), at(arg_lhs), at(arg_rhs), num_feats,
                 static_cast<gnnaccel::Message>(message), static_cast<gnnaccel::Reduce>(reduce),
                 static_cast<gnnaccel::DType>(dtype), empty_value, given, threads);
}

void spmm_backward(Address t_indptr, Address t_indices, Address t_edge_ids, int64_t t_num_rows, int64_t t_num_cols,
                   int64_t nnz, int index_type, Address x, Address weight, Address grad_out, Address grad_x,
                   Address grad_weight, int64_t num_heads, int64_t width, int dtype, int threads) {
  gnnaccel::spmm_backward(csr(t_indptr, t_indices, t_edge_ids, t_num_rows, t_num_cols, nnz, index_type), at(x),
                          at(weight), at(grad_out), at(grad_x), at(grad_weight), num_heads, width,
                          static_cast<gnnaccel::DType>(dtype), threads);
}

void sddmm(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
           int index_type, Address lhs, int64_t lhs_len, int64_t lhs_div, int lhs_target, Address rhs, int64_t rhs_len,
           int64_t rhs_div, int rhs_target, Address out, int64_t num_feats, int64_t dot_len, int op, int dtype,
           int threads) {
  gnnaccel::sddmm(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), {at(lhs), lhs_len, lhs_div},
                  static_cast<gnnaccel::Target>(lhs_target), {at(rhs), rhs_len, rhs_div},
                  static_cast<gnnaccel::Target>(rhs_target), at(out), num_feats, dot_len,
                  static_cast<gnnaccel::EdgeOp>(op), static_cast<gnnaccel::DType>(dtype), threads);
}

void edge_softmax(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                  int index_type, Address scores, Address out, int64_t num_heads, int dtype, int threads) {
  gnnaccel::edge_softmax(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at(scores), at(out),
                         num_heads, static_cast<gnnaccel::DType>(dtype), threads);
}

void edge_softmax_backward(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols,
                           int64_t nnz, int index_type, Address out, Address grad_out, Address grad_scores,
                           int64_t num_heads, int dtype, int threads) {
  gnnaccel::edge_softmax_backward(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at(out),
                                  at(grad_out), at(grad_scores), num_heads, static_cast<gnnaccel::DType>(dtype),
                                  threads);
}

void attention(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
               int index_type, Address x, Address score_src, Address score_dst, Address edge_scale, Address seed,
               double dropout, Address out, Address lse, Address out_pos, Address p_pos, double slope,
               int64_t num_heads, int64_t width, int dtype, int threads) {
  gnnaccel::attention(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at(x), at(score_src),
                      at(score_dst), {at(edge_scale), at(seed), dropout}, at(out), at(lse), at(out_pos), at(p_pos),
                      slope, num_heads, width, static_cast<gnnaccel::DType>(dtype), threads);
}

void attention_backward(Address t_indptr, Address t_indices, Address t_edge_ids, int64_t t_num_rows, int64_t t_num_cols,
                        int64_t nnz, int index_type, Address x, Address score_src, Address score_dst,
                        Address edge_scale, Address seed, double dropout, Address out, Address lse, Address out_pos,
                        Address p_pos, Address grad_out, Address grad_x, Address grad_score_src, Address grad_score_dst,
                        double slope, int64_t num_heads, int64_t width, int dtype, int threads) {
  gnnaccel::attention_backward(csr(t_indptr, t_indices, t_edge_ids, t_num_rows, t_num_cols, nnz, index_type), at(x),
                               at(score_src), at(score_dst), {at(edge_scale), at(seed), dropout}, at(out), at(lse),
                               at(out_pos), at(p_pos), at(grad_out), at(grad_x), at(grad_score_src), at(grad_score_dst),
                               slope, num_heads, width, static_cast<gnnaccel::DType>(dtype), threads);
}

void dot_attention(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                   int index_type, const pybind11::tuple& given, int threads) {
  const gnnaccel::DotAttention all = gnnaccel::dot_attention_of(given);
  const pybind11::gil_scoped_release unlocked;
  gnnaccel::dot_attention(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), all, threads);
}

void dot_attention_ends(Address out, Address stats, Address grad_out, Address ends, int64_t num_rows, int64_t num_heads,
                        int64_t width, int dtype, int threads) {
  gnnaccel::dot_attention_ends(at(out), at(stats), at(grad_out), at(ends), num_rows, num_heads, width,
                               static_cast<gnnaccel::DType>(dtype), threads);
}

void edge_factor(Address edge_scale, Address seed, double dropout, Address out, int64_t count, int dtype, int threads) {
  gnnaccel::edge_factor({at(edge_scale), at(seed), dropout}, at(out), count, static_cast<gnnaccel::DType>(dtype),
                        threads);
}

void gatv2_scores(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                  int index_type, Address x, Address y, Address vectors, Address out, double slope, int64_t num_heads,
                  int64_t width, int dtype, int threads) {
  gnnaccel::gatv2_scores(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at(x), at(y), at(vectors),
                         at(out), slope, num_heads, width, static_cast<gnnaccel::DType>(dtype), threads);
}

void gatv2_sums(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                int index_type, Address x, Address y, Address vectors, Address weights, Address sums, Address products,
                double slope, int64_t num_heads, int64_t width, int dtype, int threads) {
  gnnaccel::gatv2_sums(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at(x), at(y), at(vectors),
                       at(weights), at(sums), at(products), slope, num_heads, width,
                       static_cast<gnnaccel::DType>(dtype), threads);
}

void head_dots(Address x, Address vectors, Address out, int64_t num_rows, int64_t num_vectors, int64_t num_heads,
               int64_t width, int dtype, int threads) {
  gnnaccel::head_dots(at(x), at(vectors), at(out), num_rows, num_vectors, num_heads, width,
                      static_cast<gnnaccel::DType>(dtype), threads);
}

void head_dots_backward(Address x, Address vectors, Address grad_out, Address grad_x, Address grad_vectors,
                        int64_t num_rows, int64_t num_vectors, int64_t num_heads, int64_t width, int dtype,
                        int threads) {
  gnnaccel::head_dots_backward(at(x), at(vectors), at(grad_out), at(grad_x), at(grad_vectors), num_rows, num_vectors,
                               num_heads, width, static_cast<gnnaccel::DType>(dtype), threads);
}

void maxk(Address x, int64_t num_rows, const pybind11::tuple& kept, int dtype, int threads) {
  const gnnaccel::Compressed given = gnnaccel::compressed_of(kept);
  const pybind11::gil_scoped_release unlocked;
  gnnaccel::maxk(at(x), num_rows, given, static_cast<gnnaccel::DType>(dtype), threads);
}

void spgemm(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
            int index_type, const pybind11::tuple& x, Address weight, Address out, int dtype,
            const pybind11::tuple& around, int threads) {
  const gnnaccel::Compressed given = gnnaccel::compressed_of(x);
  const gnnaccel::Fused after = gnnaccel::fused(around);
  const pybind11::gil_scoped_release unlocked;
  gnnaccel::spgemm(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), given, at(weight), at(out),
                   static_cast<gnnaccel::DType>(dtype), after, threads);
}

void sspmm(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
           int index_type, Address grad, const pybind11::tuple& kept, Address weight, Address row_scale,
           Address grad_values, bool by_source, int dtype, int threads) {
  const gnnaccel::Compressed given = gnnaccel::compressed_of(kept);
  const pybind11::gil_scoped_release unlocked;
  gnnaccel::sspmm(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at(grad), given, at(weight),
                  at(row_scale), at(grad_values), by_source, static_cast<gnnaccel::DType>(dtype), threads);
}

void translate_columns(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols,
                       int64_t nnz, int index_type, int64_t height, Address columns, Address window_columns,
                       int threads) {
  gnnaccel::translate_columns(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), height, at(columns),
                              at(window_columns), threads);
}

void translate_blocks(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols,
                      int64_t nnz, int index_type, Address columns, const pybind11::tuple& tiles, int threads) {
  const gnnaccel::Tiles all = gnnaccel::tiles_of(tiles);
  const pybind11::gil_scoped_release unlocked;
  gnnaccel::translate_blocks(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at(columns), all,
                             threads);
}

void spmm_tiled(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                int index_type, const pybind11::tuple& tiles, Address x, Address weight, Address out, int64_t num_feats,
                bool mean, bool fast, int dtype, int threads) {
  const gnnaccel::Tiles all = gnnaccel::tiles_of(tiles);
  const pybind11::gil_scoped_release unlocked;
  gnnaccel::spmm_tiled(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), all, at(x), at(weight),
                       at(out), num_feats, mean, fast, static_cast<gnnaccel::DType>(dtype), threads);
}

void sddmm_tiled(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                 int index_type, const pybind11::tuple& tiles, Address x, Address y, Address out, int64_t num_heads,
                 int64_t len, bool fast, int dtype, int threads) {
  const gnnaccel::Tiles all = gnnaccel::tiles_of(tiles);
  const pybind11::gil_scoped_release unlocked;
  gnnaccel::sddmm_tiled(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), all, at(x), at(y), at(out),
                        num_heads, len, fast, static_cast<gnnaccel::DType>(dtype), threads);
}

void expand(const pybind11::tuple& x, int64_t num_rows, Address out, int dtype, int threads) {
  const gnnaccel::Compressed all = gnnaccel::compressed_of(x);
  const pybind11::gil_scoped_release unlocked;
  gnnaccel::expand(all, num_rows, at(out), static_cast<gnnaccel::DType>(dtype), threads);
}

void collect(Address x, int64_t num_rows, const pybind11::tuple& kept, int dtype, int threads) {
  const gnnaccel::Compressed all = gnnaccel::compressed_of(kept);
  const pybind11::gil_scoped_release unlocked;
  gnnaccel::collect(at(x), num_rows, all, static_cast<gnnaccel::DType>(dtype), threads);
}

void scatter_arg(Address arg, Address values, Address target, int64_t num_rows, int64_t num_feats, int64_t len,
                 int64_t div, bool rows_disjoint, int index_type, int dtype, int threads) {
  gnnaccel::scatter_arg(at(arg), at(values), at(target), num_rows, num_feats, len, div, rows_disjoint,
                        static_cast<gnnaccel::IndexType>(index_type), static_cast<gnnaccel::DType>(dtype), threads);
}

void edge_order(Address edge_ids, Address in, Address out, int64_t num_edges, int64_t edge_bytes, bool by_id,
                int index_type, int threads) {
  gnnaccel::edge_order(at(edge_ids), at(in), at(out), num_edges, edge_bytes, by_id,
                       static_cast<gnnaccel::IndexType>(index_type), threads);
}

int64_t coo_to_csr(Address rows, Address cols, int64_t nnz, int64_t num_rows, int64_t num_cols, int in_type,
                   Address indptr, Address indices, Address edge_ids, int out_type, int threads) {
  return gnnaccel::coo_to_csr(at(rows), at(cols), nnz, num_rows, num_cols, static_cast<gnnaccel::IndexType>(in_type),
                              at(indptr), at(indices), at(edge_ids), static_cast<gnnaccel::IndexType>(out_type),
                              threads);
}

// The members of Network, and of Members, in their order.
gnnaccel::Network network_of(const pybind11::tuple& given) {
  auto address = [&](int i) { return at(given[i].cast<Address>()); };
  auto type = [&](int i) { return static_cast<gnnaccel::IndexType>(given[i].cast<int>()); };
  return {at<int64_t>(given[0].cast<Address>()),
          address(1),
          address(2),
          at<int64_t>(given[3].cast<Address>()),
          given[4].cast<int64_t>(),
          type(5),
          type(6)};
}

gnnaccel::Members members_of(const pybind11::tuple& given) {
  auto address = [&](int i) { return at<int64_t>(given[i].cast<Address>()); };
  return {at(given[0].cast<Address>()), address(1), address(2), address(3), given[4].cast<int64_t>()};
}

int64_t edge_skew(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                  int index_type, Address hashes, int threads) {
  return gnnaccel::edge_skew(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at<int64_t>(hashes),
                             threads);
}

void network_degrees(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                     int index_type, int64_t first_row, int64_t first_col, Address place, Address degree, int type,
                     int threads) {
  gnnaccel::network_degrees(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), first_row, first_col,
                            at(place), at<int64_t>(degree), static_cast<gnnaccel::IndexType>(type), threads);
}

void network_edges(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
                   int index_type, int64_t first_row, int64_t first_col, Address place, Address next, Address cols,
                   int type, int threads) {
  gnnaccel::network_edges(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), first_row, first_col,
                          at(place), at<int64_t>(next), at(cols), static_cast<gnnaccel::IndexType>(type), threads);
}

void community_moves(const pybind11::tuple& network, Address label, Address volume, int64_t first, int64_t last,
                     double scale, int allowed, int threads) {
  const gnnaccel::Network given = network_of(network);
  const pybind11::gil_scoped_release unlocked;
  gnnaccel::community_moves(given, at(label), at<int64_t>(volume), first, last, scale,
                            static_cast<gnnaccel::Moves>(allowed), threads);
}

void community_degrees(const pybind11::tuple& network, const pybind11::tuple& members, Address degree, int threads) {
  const gnnaccel::Network given = network_of(network);
  const gnnaccel::Members nodes = members_of(members);
  const pybind11::gil_scoped_release unlocked;
  gnnaccel::community_degrees(given, nodes, at<int64_t>(degree), threads);
}

void community_edges(const pybind11::tuple& network, const pybind11::tuple& members, Address indptr, Address cols,
                     Address weights, int threads) {
  const gnnaccel::Network given = network_of(network);
  const gnnaccel::Members nodes = members_of(members);
  const pybind11::gil_scoped_release unlocked;
  gnnaccel::community_edges(given, nodes, at<int64_t>(indptr), at(cols), at(weights), threads);
}

void transpose(Address indptr, Address indices, Address edge_ids, int64_t num_rows, int64_t num_cols, int64_t nnz,
               int index_type, Address t_indptr, Address t_indices, Address t_edge_ids, int threads) {
  gnnaccel::transpose(csr(indptr, indices, edge_ids, num_rows, num_cols, nnz, index_type), at(t_indptr), at(t_indices),
                      at(t_edge_ids), threads);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("isa", &gnnaccel::isa);
  module.def("use_openmp", [](Address gomp_parallel) { gnnaccel::use_openmp(at(gomp_parallel)); });
  module.def("spmm", &spmm);
  module.def("spmm_backward", &spmm_backward, Unlocked());
  module.def("sddmm", &sddmm, Unlocked());
  module.def("edge_softmax", &edge_softmax, Unlocked());
  module.def("edge_softmax_backward", &edge_softmax_backward, Unlocked());
  module.def("attention", &attention, Unlocked());
  module.def("attention_backward", &attention_backward, Unlocked());
  module.def("dot_attention", &dot_attention);
  module.def("dot_attention_ends", &dot_attention_ends, Unlocked());
  module.def("edge_factor", &edge_factor, Unlocked());
  module.def("gatv2_scores", &gatv2_scores, Unlocked());
  module.def("gatv2_sums", &gatv2_sums, Unlocked());
  module.def("head_dots", &head_dots, Unlocked());
  module.def("head_dots_backward", &head_dots_backward, Unlocked());
  module.def("maxk", &maxk);
  module.def("spgemm", &spgemm);
  module.def("sspmm", &sspmm);
  module.def("translate_columns", &translate_columns, Unlocked());
  module.def("translate_blocks", &translate_blocks);
  module.def("spmm_tiled", &spmm_tiled);
  module.def("sddmm_tiled", &sddmm_tiled);
  module.def("expand", &expand);
  module.def("collect", &collect);
  module.def("scatter_arg", &scatter_arg, Unlocked());
  module.def("edge_order", &edge_order, Unlocked());
  module.def("coo_to_csr", &coo_to_csr, Unlocked());
  module.def("transpose", &transpose, Unlocked());
  module.def("edge_skew", &edge_skew, Unlocked());
  module.def("network_degrees", &network_degrees, Unlocked());
  module.def("network_edges", &network_edges, Unlocked());
  module.def("community_moves", &community_moves);
  module.def("community_degrees", &community_degrees);
  module.def("community_edges", &community_edges);
#ifdef GNNACCEL_WITH_CUDA
  module.attr("HAS_CUDA") = true;
  bind_cuda(module);
#else
  module.attr("HAS_CUDA") = false;
#endif
}
