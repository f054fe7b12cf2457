// The argument contract of every kernel. cuda/kernels.h repeats these names and orders with a stream in
// place of the thread count. Arguments are trusted here: gnnaccel/ops/_check.py has checked them.
//
// Every kernel writes each element of its output exactly once unless said otherwise; outputs may arrive
// uninitialised. bf16 and f16 accumulate in f32. Results do not depend on `threads`.
#pragma once

#include <memory>
#include <vector>

#include "message_program.h"
#include "types.h"

namespace gnnaccel {

// out[r, d] = reduce over nonzeros k of row r of message(lhs[indices[k], d], rhs[edge_ids[k], d]).
//   lhs.data [num_cols, lhs.len], rhs.data [nnz, rhs.len], out [num_rows, num_feats], all of `dtype`.
//   arg_lhs, arg_rhs [num_rows, num_feats] of the index type, or null: column and edge id of the winner
//   of a max or min (the first in row order), -1 in an empty row. NaN wins, as in torch.
//   empty_value is what the sum of a row without nonzeros counts as.
//   fused: for sums of copy_lhs, and of mul with one weight per edge, alone.
//   out_rows [num_rows] of the index type, or null: row i of the graph is row out_rows[i] of the results (and of
//   fused), a permutation. CPU only: what a work list is on CUDA.
void spmm(const Csr& graph, const void* out_rows, const Operand& lhs, const Operand& rhs, void* out, void* arg_lhs,
          void* arg_rhs, int64_t num_feats, Message message, Reduce reduce, DType dtype, double empty_value,
          const Fused& fused, int threads);

// Gradients of out[r] = sum over nonzeros (r, c, e) of weight[e, h] * x[c] per head h, for the transposed matrix
// (its rows are the columns c). CPU only: CUDA composes it of spmm and sddmm.
//   grad_x[c] = sum over nonzeros of weight[e, h] * grad_out[r]; grad_weight[e, h] = <x[c], grad_out[r]> in head h.
//   x, grad_x [num_cols, width], grad_out [num_rows, width], weight, grad_weight [nnz, num_heads]; width =
//   num_heads * a multiple of 4. f32 and f64.
void spmm_backward(const Csr& transposed, const void* x, const void* weight, const void* grad_out, void* grad_x,
                   void* grad_weight, int64_t num_heads, int64_t width, DType dtype, int threads);

// out[edge_ids[k], d] = op(lhs[row of its target, d], rhs[row of its target, d]) for every nonzero k.
//   num_feats is the width of out. For dot, operand rows hold num_feats groups of dot_len values: feature d
//   is the sum over j of lhs[.., i(d * dot_len + j)] * rhs[.., i(d * dot_len + j)], i() as in Operand.
//   dot_len is 1 for every other op.
void sddmm(const Csr& graph, const Operand& lhs, Target lhs_target, const Operand& rhs, Target rhs_target, void* out,
           int64_t num_feats, int64_t dot_len, EdgeOp op, DType dtype, int threads);

// out[e, h] = exp(scores[e, h] - m) / sum over the edges e' of the same row of exp(scores[e', h] - m),
// m the row's maximum; an edge's row in scores and out [nnz, num_heads] is edge_ids[k].
void edge_softmax(const Csr& graph, const void* scores, void* out, int64_t num_heads, DType dtype, int threads);

// grad_scores = out * (grad_out - sum over the row of out * grad_out), all [nnz, num_heads].
void edge_softmax_backward(const Csr& graph, const void* out, const void* grad_out, void* grad_scores,
                           int64_t num_heads, DType dtype, int threads);

// Rows weighted by a softmax of each feature over their segment: out[s, d] = sum over the rows i of segment s, those of
// indptr[s] .. indptr[s + 1], of p[i, d] * x[i, d], with p the softmax over these rows of t[d] * x[i, d]; 0 for none.
//   x [nnz, width], out [num_rows, width]; segments.indices are not read. t: of the accumulators' type (f32 for bf16),
//   [num_t], num_t = 1 or width; null for `scale`. stats [3, num_rows, width], of that type, receives the greatest t *
//   x, the reciprocal of the sum of exp(t * x - greatest), and out. f32, f64, bf16; on CUDA also f16.
void segment_softmax(const Csr& segments, const void* x, const void* t, double scale, int64_t num_t, void* out,
                     void* stats, int64_t width, DType dtype, int threads);

// Gradients of segment_softmax: grad_x like x, and each segment's part of that of t, grad_t [num_rows, width], of the
// accumulators' type; null: not wanted. `constant`: p has no gradient.
void segment_softmax_backward(const Csr& segments, const void* x, const void* t, double scale, int64_t num_t,
                              const void* stats, const void* grad_out, void* grad_x, void* grad_t, int64_t width,
                              bool constant, DType dtype, int threads);

// Additive attention: out[v] = sum over nonzeros k = (v, u, e) of p[k] * factor[e] * x[u] per head, with
// p = softmax over the row of leaky_relu(score_src[u] + score_dst[v], slope).
//   x [num_cols, width], out [num_rows, width], width = num_heads * a multiple of 4; score_src
//   [num_cols, num_heads], score_dst, lse [num_rows, num_heads].
//   lse receives the log of each row's sum of exponentials, 0 in an empty row. out_pos [num_rows, width] and
//   p_pos [num_rows, num_heads] receive the part of out and of the sum of p that comes from edges with a positive
//   score (before leaky_relu): the backward needs them. Both null: not wanted. f32 and f64. On CUDA also bf16 and f16,
//   with scores, lse and p_pos in f32, and width / num_heads a multiple of 16 bytes.
void attention(const Csr& graph, const void* x, const void* score_src, const void* score_dst, const EdgeFactor& factor,
               void* out, void* lse, void* out_pos, void* p_pos, double slope, int64_t num_heads, int64_t width,
               DType dtype, int threads);

// Gradients of attention, for the transposed matrix, from what it received and wrote; of the scores in their type.
void attention_backward(const Csr& transposed, const void* x, const void* score_src, const void* score_dst,
                        const EdgeFactor& factor, const void* out, const void* lse, const void* out_pos,
                        const void* p_pos, const void* grad_out, void* grad_x, void* grad_score_src,
                        void* grad_score_dst, double slope, int64_t num_heads, int64_t width, DType dtype, int threads);

// Attention by given scores or inner products: out[v] = sum over nonzeros k = (v, u, e) of p[k] * factor[e] * value[u]
// per head, with p = softmax over the row of scale * <query[v], key[u]> + edge_bias[e]. One of three directions:
//   forward: out and stats, which receives the maximum m of each row's scores, and one over its sum of exp(score - m);
//     0 in an empty row. (m + log of the sum in one number would have the rounding of m.)
//   rows: grad_query from ends, which dot_attention_ends makes, and grad_out.
//   columns: grad_key and grad_value, for the transposed matrix, from the same; grad_scores, if not null, receives the
//     gradient to edge_bias, or without an edge_bias that to the inner products (scale times the same): of these the
//     gradient to the queries is a weighted sum of keys. Without query and key there is no grad_key.
//   width = num_heads * a multiple of 4. f32 and f64. On CUDA also bf16 and f16, with stats and ends in f32; width /
//   num_heads a multiple of 16 bytes and at most 1024 bytes, features 16-byte aligned.
void dot_attention(const Csr& graph, const DotAttention& given, int threads);

// What the backward asks of a destination: ends [num_rows, num_heads, 4] receives the two of stats, and
// <out[v], grad_out[v]>.
void dot_attention_ends(const void* out, const void* stats, const void* grad_out, void* ends, int64_t num_rows,
                        int64_t num_heads, int64_t width, DType dtype, int threads);

// out[i] = what the factor makes of 1 for weight i = e * num_heads + h of `count`. f32 and f64; on CUDA also bf16 and
// f16.
void edge_factor(const EdgeFactor& factor, void* out, int64_t count, DType dtype, int threads);

// Edge scores of GATv2: out[e, h] = <vectors[h], leaky_relu(x[c, h] + y[r, h], slope)> for every nonzero (r, c, e).
//   x [num_cols, width], y [num_rows, width], vectors [width], out [nnz, num_heads]; width = num_heads * a multiple of
//   4. f32 and f64; on CUDA also bf16 and f16, and width / num_heads a multiple of 16 bytes, features 16-byte aligned.
void gatv2_scores(const Csr& graph, const void* x, const void* y, const void* vectors, void* out, double slope,
                  int64_t num_heads, int64_t width, DType dtype, int threads);

// Their gradients, for weights [nnz, num_heads], the gradient of the scores; with l = x[c] + y[r], k = leaky_relu'(l):
//   sums[r] = vectors * sum over the row of weights * k: that of y, and over the transposed graph with x and y changed
//   over that of x; products[r] = sum over the row of weights * k * l: adds up over the rows to that of vectors. Both
//   [num_rows, width]; products, or null, and weights in f32 for 16-bit features.
void gatv2_sums(const Csr& graph, const void* x, const void* y, const void* vectors, const void* weights, void* sums,
                void* products, double slope, int64_t num_heads, int64_t width, DType dtype, int threads);

// out[v, r, h] = <x[r], vectors[v]> in head h.
//   x [num_rows, width], vectors [num_vectors, width], out [num_vectors, num_rows, num_heads]; width = num_heads *
//   features per head. f32 and f64. On CUDA also bf16 and f16, with vectors and out in f32, and one or two vectors.
void head_dots(const void* x, const void* vectors, void* out, int64_t num_rows, int64_t num_vectors, int64_t num_heads,
               int64_t width, DType dtype, int threads);

// Gradients of head_dots; grad_out is like out, grad_vectors like vectors. add: that of x is added to what grad_x has.
void head_dots_backward(const void* x, const void* vectors, const void* grad_out, void* grad_x, void* grad_vectors,
                        bool add, int64_t num_rows, int64_t num_vectors, int64_t num_heads, int64_t width, DType dtype,
                        int threads);

// Messages that a program computes for each nonzero, reduced over the rows or not at all: results[2 i] of output i is
//   [num_rows, width] for sum, mean, max and min, 0 in an empty row; [nnz, width] by edge ids for none. For max and min
//   results[2 i + 1], of the index type, receives the edge ids of the largest or smallest as spmm's arg_rhs does.
//   operands[i] of leaf i: [num_cols | num_rows | nnz | 1, width]. CPU only.
void message_walk(const Csr& graph, const MessageProgram& program, const void* const* operands, void* const* results,
                  int threads);

// out = linear(relu(batch_norm(hidden))), hidden = linear(x), of f32 x [num_rows, inner], weight [width, inner] and
// last_weight [outer, width]; biases may be null. hidden [num_rows, width] and norm [4, width] are kept for the
// backward pass. The norm is by the statistics of these rows, at least two; running_mean and running_var, both null or
// neither, move towards them. In f32 but for sums over many rows. On CUDA widths are multiples of 4. On the CPU gamma,
// beta and norm may be null, for layers without a norm: hidden is then what the ReLU gave.
void normed_layers(const void* x, const void* weight, const void* bias, const void* gamma, const void* beta,
                   void* running_mean, void* running_var, const void* last_weight, const void* last_bias, void* hidden,
                   void* norm, void* out, int64_t num_rows, int64_t inner, int64_t width, int64_t outer, double eps,
                   double momentum, int threads);

// Its gradients, without that to the first bias, which is 0. grad_x, grad_weight and, both or the second,
// grad_last_weight and grad_last_bias may be null; weight without grad_x. Without a norm grad_gamma is null, and
// grad_beta, or null, receives that to the first bias; grad_last_weight may be null alone.
void normed_layers_backward(const void* x, const void* weight, const void* last_weight, const void* hidden,
                            const void* norm, const void* grad, void* grad_x, void* grad_weight, void* grad_gamma,
                            void* grad_beta, void* grad_last_weight, void* grad_last_bias, int64_t num_rows,
                            int64_t inner, int64_t width, int64_t outer, int threads);

// Of each row of x [num_rows, kept.num_feats] the k largest, into values and places of kept, which are written through.
// NaN counts as larger than all numbers, -0 as 0; of equal ones those with the lowest feature are kept.
void maxk(const void* x, int64_t num_rows, const Compressed& kept, DType dtype, int threads);

// out [num_rows, x.num_feats]: x with 0 for what it does not keep. Any dtype.
void expand(const Compressed& x, int64_t num_rows, void* out, DType dtype, int threads);

// Of x [num_rows, kept.num_feats] what lies at the places of kept, into its values. Any dtype.
void collect(const void* x, int64_t num_rows, const Compressed& kept, DType dtype, int threads);

// out[r] = sum over nonzeros (r, c, e) of weight[e] * x[c], entries that x does not keep being 0.
//   x [num_cols, num_feats], weight [nnz] or null (ones), out [num_rows, num_feats]. fused: what becomes of a finished
//   sum alone (row_scale, bias, relu).
void spgemm(const Csr& graph, const Compressed& x, const void* weight, void* out, DType dtype, const Fused& fused,
            int threads);

// Its gradient with respect to the values: grad_values[c, j] = sum over nonzeros (r, c, e) of weight[e] * row_scale[r]
// * grad[r, kept.places[c, j]]. grad [num_rows, num_feats], row_scale [num_rows] or null (ones), values of kept not
// read.
//   grad_values [num_cols, k] and row_scale are in f64 for f64, else in f32.
//   by_source: `graph` is the transposed one (its rows are the c); else grad_values arrives zero-filled and is added
//   to.
void sspmm(const Csr& graph, const void* grad, const Compressed& kept, const void* weight, const void* row_scale,
           void* grad_values, bool by_source, DType dtype, int threads);

// First half of a translation (types.h: Tiles): columns[k], the place of nonzero k's column among those of its window,
// and window_columns[w], how many these are. columns [nnz], window_columns [ceil(num_rows / height)], of index_type.
void translate_columns(const Csr& graph, int64_t height, void* columns, void* window_columns, int threads);

// Second half, from these columns and the window_ptr that they ask for: all other arrays of tiles, whose pointers are
// written through.
void translate_blocks(const Csr& graph, const void* columns, const Tiles& tiles, int threads);

// out[r] = sum (or mean) over the nonzeros of row r of weight * x[column], 0 in an empty row, by tiles of the graph.
//   x [num_cols, num_feats], weight [nnz] or null (ones), out [num_rows, num_feats]. f32 and f64. On CUDA f32, bf16 and
//   f16, tiles of 16 x 8, rows of a multiple of 16 bytes, 16-byte aligned; fast: products of f32 in tf32, which keeps
//   11 bits of x and weight, instead of 22.
void spmm_tiled(const Csr& graph, const Tiles& tiles, const void* x, const void* weight, void* out, int64_t num_feats,
                bool mean, bool fast, DType dtype, int threads);

// out[e, h] = sum over d of x[column of e, h, d] * y[row of e, h, d], by tiles of the graph.
//   x [num_cols, num_heads, len], y [num_rows, num_heads, len], out [nnz, num_heads]. Types and `fast` as of
//   spmm_tiled; on CUDA len is a multiple of 16 bytes.
void sddmm_tiled(const Csr& graph, const Tiles& tiles, const void* x, const void* y, void* out, int64_t num_heads,
                 int64_t len, bool fast, DType dtype, int threads);

// target[arg[r, d], (d / div) % len] += values[r, d] wherever arg[r, d] >= 0: the backward of max and min.
//   arg, values [num_rows, num_feats]; target [num_targets, len], already zeroed. rows_disjoint: two rows r
//   never name the same target row (edges), so rows may run in parallel; else features do, and len must be
//   num_feats with div = 1.
void scatter_arg(const void* arg, const void* values, void* target, int64_t num_rows, int64_t num_feats, int64_t len,
                 int64_t div, bool rows_disjoint, IndexType index_type, DType dtype, int threads);

// Values of edges, `edge_bytes` each (an even number), between the order of edge ids and that of the nonzeros k:
// out[k] = in[edge_ids[k]]; scatter: out[edge_ids[k]] = in[k]. edge_ids [num_edges] is a permutation.
void edge_order(const void* edge_ids, const void* in, void* out, int64_t num_edges, int64_t edge_bytes, bool scatter,
                IndexType index_type, int threads);

// Stable counting sort of COO pairs by row: indptr [num_rows + 1], indices and edge_ids [nnz]. rows and cols
// are int64 or int32 (in_type); outputs are of out_type. Returns 0; -1 for pairs that come by ascending rows, whose
// edge ids would be 0, 1, ... and are not written; or 1 + the position of a pair outside [0, num_rows) x [0, num_cols),
// in which case the outputs are undefined. Another thread may write to the pairs meanwhile: what is returned is right
// for some of the values they had, and nothing else is touched.
int64_t coo_to_csr(const void* rows, const void* cols, int64_t nnz, int64_t num_rows, int64_t num_cols,
                   IndexType in_type, void* indptr, void* indices, void* edge_ids, IndexType out_type, int threads);

// The same of a square matrix with one more nonzero (r, r) for each row, behind all pairs; pairs (r, r) among these do
// not count if they are `dropped`. CPU only.
//   indptr [num_rows + 1]; indices, edge_ids [nnz + num_rows]. Returns how many of these are there, or -1 for an index
//   out of range.
int64_t coo_to_looped_csr(const void* rows, const void* cols, int64_t nnz, int64_t num_rows, bool dropped,
                          IndexType in_type, void* indptr, void* indices, void* edge_ids, IndexType out_type,
                          int threads);

// The edges of a graph by (relation, row), those of the same two being one row of the result; in each the order of the
// graph. CPU only.
//   types [nnz] of type_type, by edge id, in [0, relations).
//   far, edges [nnz]: column and id of each edge in that order. ends [nnz] and bounds [nnz + 1]: the graph's row of
//   each row of the result, and its first edge; behind these nnz. ptr [relations + 1]: first row of each relation.
//   sizes [nnz]: how many edges lie in the row of each edge, by edge id. far, ends and bounds are of the graph's
//   index_type. Returns how many rows there are.
int64_t relation_rows(const Csr& graph, const void* types, int64_t relations, IndexType type_type, void* far,
                      int64_t* edges, void* ends, void* bounds, int64_t* ptr, int64_t* sizes, int threads);

// An undirected graph of weighted edges. What finds communities in it, down to community_edges, is of the CPU alone
// (gnnaccel/graph/network.py).
struct Network {
  const int64_t* indptr;    // [num_nodes + 1]
  const void* cols;         // [indptr[num_nodes]], of col_type: neighbours, each node's own number not among them
  const void* weights;      // as many, of weight_type; null: ones
  const int64_t* strength;  // [num_nodes]: what each node weighs
  int64_t num_nodes;
  IndexType col_type;
  IndexType weight_type;
};

// Sum over the nonzeros (r, c) of a[r] b[c] - b[r] a[c], wrapping around; a and b [num_rows] of a square graph
// alternate in `hashes`. With random numbers there it is 0 where each edge is there as often the other way round, and
// almost nowhere else.
int64_t edge_skew(const Csr& graph, const int64_t* hashes, int threads);

// The two halves of making a network: how many neighbours a graph's rows have, and which. Row r is the network's node
// place[first_row + r], column c its node place[first_col + c]; what is its own neighbour does not count.
//   degree [num_nodes] is added to. next [num_nodes], where each node's neighbours go in cols, moves on with them;
//   place and cols are of `type`.
void network_degrees(const Csr& graph, int64_t first_row, int64_t first_col, const void* place, int64_t* degree,
                     IndexType type, int threads);
void network_edges(const Csr& graph, int64_t first_row, int64_t first_col, const void* place, int64_t* next, void* cols,
                   IndexType type, int threads);

// The nodes of each of `count` communities.
struct Members {
  const void* label;      // [num_nodes], of col_type: community of each node
  const int64_t* nodes;   // [num_nodes]: community by community
  const int64_t* bounds;  // [count + 1]: first of each in nodes
  const int64_t* edges;   // [count + 1]: edges of the communities before each
  int64_t count;
};

// Which labels a node may take: any, or none above or below its own.
enum class Moves : int { any = 0, down = 1, up = 2 };

// Nodes [first, last) each take the label of the best community among their neighbours' and their own, all at once.
//   label [num_nodes], of col_type, and volume [num_nodes]: community of each node, sum of strength over each
//   community; both are brought up to date. scale: what a product of strengths costs.
void community_moves(const Network& network, void* label, int64_t* volume, int64_t first, int64_t last, double scale,
                     Moves allowed, int threads);

// degree [count] receives to how many others each community has edges.
void community_degrees(const Network& network, const Members& members, int64_t* degree, int threads);

// The network of communities, from the indptr [count + 1] of their degrees: cols, ascending in a row, and weights, sums
// over the edges between two, both of the network's types.
void community_edges(const Network& network, const Members& members, const int64_t* indptr, void* cols, void* weights,
                     int threads);

// How nodes are cut into parts. A node counts as two kinds of load, such as edges and nodes.
struct Cut {
  const int64_t* size;  // [2, num_nodes]: what each node counts as
  const int64_t* cap;   // [2]: of a part; one above it gives nodes away, also at a loss
  int64_t parts;
};

// Sweeps of Fiduccia and Mattheyses (1982): each node moves once, the best first, also where that loses edges; what the
// best moment had is kept. A sweep ends after `patience` moves without a better one. CPU only, as are the next two.
//   part [num_nodes] is brought up to date. Keeps num_nodes * parts sums of weights.
void part_sweeps(const Network& network, const Cut& cut, int64_t* part, int64_t sweeps, int64_t patience, int threads);

// Passes of moves that leave fewer pairs of a node and another part that has neighbours of it; of as many, fewer edges
// between parts. As part_sweeps otherwise.
void part_halo_moves(const Network& network, const Cut& cut, int64_t* part, int64_t passes, int threads);

// Parts of equal work that grow one after the other, the first from node `first`, by the node of whose edges to nodes
// without a part most lead into it.
//   work [num_nodes]; part [num_nodes].
void part_growth(const Network& network, const double* work, int64_t parts, int64_t first, int64_t* part, int threads);

// The transposed matrix: t_indptr [num_cols + 1], t_indices (rows of `graph`) and t_edge_ids [nnz], with
// edge ids carried along. Columns keep ascending row order.
void transpose(const Csr& graph, void* t_indptr, void* t_indices, void* t_edge_ids, int threads);

// The sum over the columns of a graph whose transposed matrix nobody keeps: out[c] = sum over nonzeros (r, c, e) of
// weight[e] * x[r]. Makes that matrix for this call alone, and gives the bits of `spmm` over it.
//   x [num_rows, num_feats], weight [nnz] or null for ones, out [num_cols, num_feats]; `fused` as spmm over the
//   transposed matrix has it.
void spmm_transposed(const Csr& graph, const void* x, const void* weight, void* out, int64_t num_feats, DType dtype,
                     const Fused& fused, int threads);

// out[r] = 1 / sqrt(nonzeros of row r), 0 for an empty row: [num_rows], f32 or f64. CPU only.
void inverse_roots(const void* indptr, int64_t num_rows, IndexType type, void* out, DType dtype, int threads);

// ---- Sampling: of the CPU. Arrays named "of index_type" share one type, that of the whole graph. Arguments are not
// trusted in full: every index that is read, of a seed, a row or a neighbour, is checked before it is used, as a graph
// may be written into between two batches. What is wrong throws std::invalid_argument.

// Memory that a kernel asks for as it learns how much it needs; it is freed with the last that has it.
struct Array {
  void* data = nullptr;
  int64_t size = 0;   // elements, of index_type
  int64_t width = 8;  // bytes of one
  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array();
};
using Arrays = std::vector<std::shared_ptr<Array>>;

// One type of edges, by destination: row r has the sources indices[indptr[r]] to indices[indptr[r + 1] - 1].
struct Relation {
  const void* indptr;        // [num_rows + 1], of index_type
  const void* indices;       // [nnz], of index_type
  const void* weight;        // [nnz], f32 or f64, or null: uniform
  const int64_t* edge_time;  // [nnz], ascending in each row, or null
  int64_t num_rows;
  int64_t nnz;
  int64_t source;  // types of its nodes: places in the list of node types
  int64_t target;
  DType weight_type;
  std::vector<int64_t> fanouts;  // one per hop; -1: every neighbour
};

// One type of nodes, and where a batch starts among them.
struct NodeType {
  const void* seeds;         // [num_seeds], of index_type
  const int64_t* node_time;  // [num_nodes], or null; sources ascend by it in each row
  int64_t num_seeds;
  int64_t num_nodes;   // -1: not known
  int64_t first_seed;  // number of the first seed among those of all types: its tree in a disjoint sample
  int64_t place;       // first entry in the table of whoever calls, or -1: none, a hash table is made
};

// What holds for a whole batch.
struct Draw {
  uint64_t* table;           // one entry per node of the types that have a place; see Table in sampling.h
  const int64_t* seed_time;  // [seeds of all types], or null: time does not matter
  uint64_t seed;
  int64_t stamp;  // of this call in the table: above that of every call before, below 2^32
  int64_t num_hops;
  IndexType index_type;
  bool replace;
  bool disjoint;  // each seed has a tree of its own
  bool last;      // of those that are early enough, the latest instead of any
  bool resample;  // each hop draws for all nodes so far, not only for those that the hop before has added
};

struct Samples {
  Arrays nodes;                                     // by node type: the seeds, then others as they appear
  Arrays trees;                                     // by node type, if disjoint: number of the seed of each
  Arrays rows;                                      // by relation: source of each edge, a place in nodes
  Arrays cols;                                      // destination, ascending
  Arrays edges;                                     // place in indices
  std::vector<std::vector<int64_t>> nodes_per_hop;  // [node types][num_hops + 1]
  std::vector<std::vector<int64_t>> edges_per_hop;  // [relations][num_hops]
};

// Sources of the seeds, sources of those, and so on for num_hops hops. In each hop every node that the hop before has
// added (with `resample` every node so far) is the destination of up to fanouts[hop] edges of each relation, relations
// in their order.
//   Without `replace` a row gives distinct edges, all of them if it has no more than that, and every set of so many
//   equally likely; with weights, one after the other, each by its weight among those that are left. With it, fanouts
//   [hop] edges drawn one by one. Edges of weight 0 are drawn by neither.
//   With seed_time, an edge counts if its edge_time, or else its source's node_time, is not above that of the seed.
//   The result depends on draw.seed and on no number of threads.
Samples neighbor_sample(const std::vector<NodeType>& types, const std::vector<Relation>& relations, const Draw& draw,
                        int threads);

// Sampling by layers, of HGT (Hu et al., WWW 2020): in each hop counts[type][hop] nodes of each type, drawn without
// replacement from the sources of the nodes so far. A source's probability is the square of what these nodes give it:
// each shares 1 among the sources of a relation, or among 50 of them, drawn uniformly, where there are more.
//   Samples has nodes and nodes_per_hop. Of one thread.
Samples layer_sample(const std::vector<NodeType>& types, const std::vector<Relation>& relations,
                     const std::vector<std::vector<int64_t>>& counts, const Draw& draw, int threads);

// Edges of a relation between given nodes. targets [num_targets] and sources [num_sources] of index_type; their trees
// likewise, or null: an edge must not leave its tree. Where a source is there twice, its first place counts.
//   Samples has rows, cols and edges of the one relation, and edges_per_hop[0] the number of edges of each target.
Samples induced_subgraph(const Relation& relation, const void* targets, const void* target_trees, int64_t num_targets,
                         const void* sources, const void* source_trees, int64_t num_sources, int64_t num_nodes,
                         const Draw& draw, int threads);

}  // namespace gnnaccel
