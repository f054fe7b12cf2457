// The CUDA half of ../cpp/kernels.h: the same names, the same arguments in the same order, a stream in place of
// the thread count. What an argument means is said there. In addition, here:
//   - pointers are device pointers of the current device; nothing is allocated, nothing synchronises, all work
//     goes to `stream` and can be captured in a CUDA graph;
//   - a kernel that can work through a work list takes it after the graph;
//   - a kernel that needs scratch memory is first given the workspace that it asks for it;
//   - results are the same bits on every run, except of scatter_arg and sspmm where they say so;
//   - the return value is that of the launches.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "../cpp/types.h"

namespace gnnaccel {
namespace cuda {

// Scratch memory of one call.
class Workspace {
 public:
  // 16-byte aligned, contents irrelevant, for what is put on the stream during the call; null for no bytes.
  virtual void* take(int64_t bytes) = 0;

 protected:
  ~Workspace() = default;
};

// arg_lhs and arg_rhs are 16-byte aligned.
cudaError_t spmm(Workspace& workspace, const Csr& graph, const WorkList& work, const Operand& lhs, const Operand& rhs,
                 void* out, void* arg_lhs, void* arg_rhs, int64_t num_feats, Message message, Reduce reduce,
                 DType dtype, double empty_value, const Fused& fused, cudaStream_t stream);

cudaError_t sddmm(const Csr& graph, const WorkList& work, const Operand& lhs, Target lhs_target, const Operand& rhs,
                  Target rhs_target, void* out, int64_t num_feats, int64_t dot_len, EdgeOp op, DType dtype,
                  cudaStream_t stream);

cudaError_t edge_softmax(Workspace& workspace, const Csr& graph, const void* scores, void* out, int64_t num_heads,
                         DType dtype, cudaStream_t stream);

cudaError_t edge_softmax_backward(Workspace& workspace, const Csr& graph, const void* out, const void* grad_out,
                                  void* grad_scores, int64_t num_heads, DType dtype, cudaStream_t stream);

// At most some thousand rows to a segment: a block takes one.
cudaError_t segment_softmax(const Csr& segments, const void* x, const void* t, double scale, int64_t num_t, void* out,
                            void* stats, int64_t width, DType dtype, cudaStream_t stream);

cudaError_t segment_softmax_backward(const Csr& segments, const void* x, const void* t, double scale, int64_t num_t,
                                     const void* stats, const void* grad_out, void* grad_x, void* grad_t, int64_t width,
                                     bool constant, DType dtype, cudaStream_t stream);

// Features and outputs but lse and p_pos are 16-byte aligned.
cudaError_t attention(Workspace& workspace, const Csr& graph, const WorkList& work, const void* x,
                      const void* score_src, const void* score_dst, const EdgeFactor& factor, void* out, void* lse,
                      void* out_pos, void* p_pos, double slope, int64_t num_heads, int64_t width, DType dtype,
                      cudaStream_t stream);

cudaError_t attention_backward(Workspace& workspace, const Csr& transposed, const WorkList& work, const void* x,
                               const void* score_src, const void* score_dst, const EdgeFactor& factor, const void* out,
                               const void* lse, const void* out_pos, const void* p_pos, const void* grad_out,
                               void* grad_x, void* grad_score_src, void* grad_score_dst, double slope,
                               int64_t num_heads, int64_t width, DType dtype, cudaStream_t stream);

// Without query and key the forward alone, which has no stats: cheaper than a backward in one pass are edge_softmax,
// sddmm and spmm.
cudaError_t dot_attention(Workspace& workspace, const Csr& graph, const WorkList& work, const DotAttention& given,
                          cudaStream_t stream);

cudaError_t dot_attention_ends(const void* out, const void* stats, const void* grad_out, void* ends, int64_t num_rows,
                               int64_t num_heads, int64_t width, DType dtype, cudaStream_t stream);

cudaError_t edge_factor(const EdgeFactor& factor, void* out, int64_t count, DType dtype, cudaStream_t stream);

cudaError_t gatv2_scores(const Csr& graph, const WorkList& work, const void* x, const void* y, const void* vectors,
                         void* out, double slope, int64_t num_heads, int64_t width, DType dtype, cudaStream_t stream);

cudaError_t gatv2_sums(Workspace& workspace, const Csr& graph, const WorkList& work, const void* x, const void* y,
                       const void* vectors, const void* weights, void* sums, void* products, double slope,
                       int64_t num_heads, int64_t width, DType dtype, cudaStream_t stream);

// One or two vectors.
cudaError_t head_dots(const void* x, const void* vectors, void* out, int64_t num_rows, int64_t num_vectors,
                      int64_t num_heads, int64_t width, DType dtype, cudaStream_t stream);

cudaError_t head_dots_backward(Workspace& workspace, const void* x, const void* vectors, const void* grad_out,
                               void* grad_x, void* grad_vectors, bool add, int64_t num_rows, int64_t num_vectors,
                               int64_t num_heads, int64_t width, DType dtype, cudaStream_t stream);

// out [num_rows, width] = x [num_rows, width] of `dtype` + bias [width], these two of f64 for f64, else of f32. Rows
// are whole vectors of 16 bytes. CUDA only, as the next.
cudaError_t add_bias(const void* x, const void* bias, void* out, int64_t num_rows, int64_t width, DType dtype,
                     cudaStream_t stream);

// out [width] = sums of the columns of x [num_rows, width] of `dtype`, in f64 for f64, else in f32; and of f32 where
// `rounded` is not null there x in a 16-bit dtype.
cudaError_t column_sums(Workspace& workspace, const void* x, void* out, void* rounded, DType rounded_dtype,
                        int64_t num_rows, int64_t width, DType dtype, cudaStream_t stream);

// out[i] = x_i @ weight[s] for the rows i of segment s. The CPU's are products of torch's.
//   x_i     row i of x; or, with `sums` of num_rows rows, the sum over the nonzeros k of its row i of factors[k] times
//           the row of x that k has for a column; factors of the dtype, null for ones. A thread adds up a row: for
//           short ones.
//   x       [num_rows or sums' columns, num_heads * inner]      ptr  [num_segments + 1], int64, from 0 to num_rows
//   weight  [num_segments, num_heads, inner, outer]; transposed: [.., outer, inner]
//   out     [num_rows, num_heads * outer], 16-byte aligned
// At most 65535 heads times 64 values in a row of a matrix.
cudaError_t segment_matmul(const Csr* sums, const void* factors, const void* x, const void* ptr, const void* weight,
                           void* out, int64_t num_rows, int64_t num_segments, int64_t num_heads, int64_t inner,
                           int64_t outer, bool transposed, DType dtype, cudaStream_t stream);

// out[s] = x[rows of s].T @ grad[rows of s], [num_segments, num_heads, inner, outer], of grad [num_rows, num_heads *
// outer]; zeros for a segment without rows. Rows of x, and of grad, may be sums as above. At most 65535 heads times
// tiles of 64 x 64 values of a matrix.
cudaError_t segment_matmul_weights(Workspace& workspace, const Csr* sums, const void* factors, const void* x,
                                   const void* ptr, const Csr* grad_sums, const void* grad_factors, const void* grad,
                                   void* out, int64_t num_rows, int64_t num_segments, int64_t num_heads, int64_t inner,
                                   int64_t outer, DType dtype, cudaStream_t stream);

// Products of f32 matrices of many rows with small ones, on tensor cores: a float as two tf32, as near as f32 adds up.
// An infinity among the operands gives NaN. Widths are multiples of 4; all is contiguous and 16-byte aligned. The CPU's
// are products of torch's.
//   x [num_rows, inner], weight [outer, inner], bias [outer] or null, out [num_rows, outer]; transposed: of weight
//   [inner, outer].
cudaError_t linear(const void* x, const void* weight, const void* bias, void* out, int64_t num_rows, int64_t inner,
                   int64_t outer, bool transposed, cudaStream_t stream);

// grad_weight [outer, inner] = grad.T @ x, and grad_bias the sum of grad's rows, or null.
cudaError_t linear_weights(Workspace& workspace, const void* x, const void* grad, void* grad_weight, void* grad_bias,
                           int64_t num_rows, int64_t inner, int64_t outer, cudaStream_t stream);

// out = linear(relu(batch_norm(hidden))), hidden = linear(x), both products as above; hidden [num_rows, width] and norm
// [4, width] are kept for the backward pass. The norm is by the statistics of these rows, at least two; running_mean
// and running_var, both null or neither, move towards them. In f32 but for sums of tiles.
cudaError_t normed_layers(Workspace& workspace, const void* x, const void* weight, const void* bias, const void* gamma,
                          const void* beta, void* running_mean, void* running_var, const void* last_weight,
                          const void* last_bias, void* hidden, void* norm, void* out, int64_t num_rows, int64_t inner,
                          int64_t width, int64_t outer, double eps, double momentum, cudaStream_t stream);

// Its gradients, without that to the first bias, which is 0. grad_x, grad_weight and, both or the second,
// grad_last_weight and grad_last_bias may be null; weight without grad_x.
cudaError_t normed_layers_backward(Workspace& workspace, const void* x, const void* weight, const void* last_weight,
                                   const void* hidden, const void* norm, const void* grad, void* grad_x,
                                   void* grad_weight, void* grad_gamma, void* grad_beta, void* grad_last_weight,
                                   void* grad_last_bias, int64_t num_rows, int64_t inner, int64_t width, int64_t outer,
                                   cudaStream_t stream);

// rows_disjoint: every target element is owned by one thread, same bits on every run. Otherwise atomics add in
// any order. f32 and f64 only, but for rows_disjoint with len == num_feats (where nothing is ever added twice):
// a 16-bit target would be rounded after each addition. cudaErrorInvalidValue for the rest.
cudaError_t scatter_arg(const void* arg, const void* values, void* target, int64_t num_rows, int64_t num_feats,
                        int64_t len, int64_t div, bool rows_disjoint, IndexType index_type, DType dtype,
                        cudaStream_t stream);

cudaError_t edge_order(const void* edge_ids, const void* in, void* out, int64_t num_edges, int64_t edge_bytes,
                       bool scatter, IndexType index_type, cudaStream_t stream);

// Makes the CSR of pairs whose rows ascend. found, two numbers of the host, receive whether a pair is out of range, and
// whether rows do not ascend, for which the call waits; if either, the CSR is worth nothing. Null: that is known.
cudaError_t coo_in_order(const void* rows, const void* cols, int64_t nnz, int64_t num_rows, int64_t num_cols,
                         IndexType in_type, void* indptr, void* indices, IndexType out_type, int64_t* found,
                         cudaStream_t stream);

// Of pairs that have been checked.
cudaError_t coo_to_csr(Workspace& workspace, const void* rows, const void* cols, int64_t nnz, int64_t num_rows,
                       int64_t num_cols, IndexType in_type, void* indptr, void* indices, void* edge_ids,
                       IndexType out_type, cudaStream_t stream);

cudaError_t maxk(const void* x, int64_t num_rows, const Compressed& kept, DType dtype, cudaStream_t stream);

cudaError_t expand(const Compressed& x, int64_t num_rows, void* out, DType dtype, cudaStream_t stream);
cudaError_t collect(const void* x, int64_t num_rows, const Compressed& kept, DType dtype, cudaStream_t stream);

// At most 4096 features. Rows of k divisible by 8 are read in vectors: values and places lie as torch allocates them.
cudaError_t spgemm(Workspace& workspace, const Csr& graph, const WorkList& work, const Compressed& x,
                   const void* weight, void* out, DType dtype, const Fused& fused, cudaStream_t stream);

// By destination (not by_source) additions come in any order, and there are at most 4096 features.
cudaError_t sspmm(Workspace& workspace, const Csr& graph, const WorkList& work, const void* grad,
                  const Compressed& kept, const void* weight, const void* row_scale, void* grad_values, bool by_source,
                  DType dtype, cudaStream_t stream);

// As many windows, rows in them and columns as 64 bits can number.
cudaError_t translate_columns(Workspace& workspace, const Csr& graph, int64_t height, void* columns,
                              void* window_columns, cudaStream_t stream);

cudaError_t translate_blocks(Workspace& workspace, const Csr& graph, const void* columns, const Tiles& tiles,
                             cudaStream_t stream);

cudaError_t spmm_tiled(Workspace& workspace, const Csr& graph, const Tiles& tiles, const void* x, const void* weight,
                       void* out, int64_t num_feats, bool mean, bool fast, DType dtype, cudaStream_t stream);

// 16-byte aligned, and of whole vectors of 16 bytes to a head.
cudaError_t sddmm_tiled(const Csr& graph, const Tiles& tiles, const void* x, const void* y, void* out,
                        int64_t num_heads, int64_t len, bool fast, DType dtype, cudaStream_t stream);

cudaError_t transpose(Workspace& workspace, const Csr& graph, void* t_indptr, void* t_indices, void* t_edge_ids,
                      cudaStream_t stream);

cudaError_t spmm_transposed(Workspace& workspace, const Csr& graph, const void* x, const void* weight, void* out,
                            int64_t num_feats, DType dtype, const Fused& fused, cudaStream_t stream);

// ---- The steps of neighbor_sample; gnnaccel/sampling/on_cuda.py puts them together. A step draws the edges of one
// relation in one hop. How many rows and edges it has stays on the device: launches are for as many as there may be. As
// on the CPU, every index that is read is checked before it is used.

// One type of nodes in a batch.
struct SampleNodes {
  const void* seeds;         // [num_seeds], of index_type
  const int64_t* node_time;  // [num_nodes], or null
  void* nodes;               // [most nodes], of index_type: the seeds, then others as they appear
  void* trees;               // [most nodes], of index_type: number of the seed of each; null unless trees are disjoint
  void* places;              // [num_seeds + most edges from here], uint32: of seed i, and of the node that an edge, of
                             // all those from here, is the first to come from
  void* table;               // uint32 for each node of the graph, or `slots` numbers and as many uint32
  int64_t num_seeds;
  int64_t first_seed;  // number of the first seed among those of all types
  int64_t num_nodes;   // numbers of nodes are below; times the seeds of all types below 2^64
  int64_t slots;       // a power of two, at least twice as many as nodes that there may be; or 0, not of disjoint trees
};

// One relation in a batch, beside its Csr, whose num_cols nobody reads.
struct SampleEdges {
  const void* weight;        // [nnz], f32 or f64, or null: uniform
  const int64_t* edge_time;  // [nnz], or null
  void* rows;                // [most edges], of index_type: source of each edge, a place among the nodes of its type
  void* cols;                // destination, ascending in each hop
  void* edges;               // place in indices
  int64_t number;            // of the relation, and of the types of its nodes
  int64_t source;
  int64_t target;
  DType weight_type;
};

// What is wrong, or -1, and what there is so far before each step and after the last: nodes of each type, edges from
// each type, edges of each relation.
struct SampleBatch {
  int64_t* state;            // [1 + (num_steps + 1) * (2 * num_types + num_relations)]
  const int64_t* seed_time;  // [seeds of all types], or null: time does not matter
  int64_t num_types;
  int64_t num_relations;
  IndexType index_type;
};
// What is wrong, in the upper 8 bits of state[0]; then 16 bits of which type or relation; then 40 saying where: number
// of a seed, node, place in indices.
enum class SampleError : int {
  seeds = 0,
  indptr = 1,
  no_row = 2,
  indices = 3,
  weight = 4,
  weight_sum = 5,
  time = 6,
  changed = 7
};

// Rows of a step are the nodes that there are before step `end`, without those that there are before step `begin`, if
// that is not -1.
struct SampleStep {
  int64_t number;
  int64_t begin;
  int64_t end;
  int64_t max_rows;
  int64_t max_edges;
  int64_t fanout;
  uint64_t seed;  // of the hop
  bool replace;
  bool last;      // of edges that are early enough, the latest instead of any
  int64_t* rows;  // [max_rows + 1]: where the edges of each row go among those of the step, the last one how many these
                  // are; [max_rows], [max_rows]: first place in indices and number of what may be drawn; with weights
                  // [max_rows + 1]: how many rows are long, and which
};

// Takes in the seeds of a type, that of number 0 first.
cudaError_t sample_seeds(const SampleNodes& type, int64_t number, const SampleBatch& batch, cudaStream_t stream);

// Enters the nodes of a type before a step in a table of more slots.
cudaError_t sample_table(const SampleNodes& type, int64_t number, const SampleBatch& batch, int64_t step,
                         cudaStream_t stream);

// Writes step.rows. Reads no max_edges.
cudaError_t sample_degrees(Workspace& workspace, const Csr& graph, const SampleNodes& source, const SampleNodes& target,
                           const SampleEdges& edges, const SampleBatch& batch, const SampleStep& step,
                           cudaStream_t stream);

// The step's edges, at most max_edges, and the nodes that they add.
cudaError_t sample_edges(Workspace& workspace, const Csr& graph, const SampleNodes& source, const SampleNodes& target,
                         const SampleEdges& edges, const SampleBatch& batch, const SampleStep& step,
                         cudaStream_t stream);

// Steps whose max_edges are known, one after the other: of each its relation, by number, of `graphs` and `relations`.
cudaError_t sample_steps(Workspace& workspace, const std::vector<Csr>& graphs, const std::vector<SampleNodes>& types,
                         const std::vector<SampleEdges>& relations, const SampleBatch& batch,
                         const std::vector<SampleStep>& steps, const std::vector<int64_t>& relation_of,
                         cudaStream_t stream);

}  // namespace cuda
}  // namespace gnnaccel
