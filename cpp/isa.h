// One entry per kernel and instruction set; dispatch.cpp picks a set when the library is loaded.
#pragma once

#include "message_program.h"
#include "types.h"

namespace gnnaccel {

struct SpmmArgs {
  const Csr& graph;
  const void* out_rows;
  const Operand& lhs;
  const Operand& rhs;
  void* out;
  void* arg_lhs;
  void* arg_rhs;
  int64_t num_feats;
  Message message;
  Reduce reduce;
  DType dtype;
  double empty_value;
  const Fused& fused;
  int threads;
};

struct SpmmBackwardArgs {
  const Csr& transposed;
  const void* x;
  const void* weight;
  const void* grad_out;
  void* grad_x;
  void* grad_weight;
  int64_t num_heads;
  int64_t width;
  DType dtype;
  int threads;
};

struct SddmmArgs {
  const Csr& graph;
  const Operand& lhs;
  Target lhs_target;
  const Operand& rhs;
  Target rhs_target;
  void* out;
  int64_t num_feats;
  int64_t dot_len;
  EdgeOp op;
  DType dtype;
  int threads;
};

struct EdgeSoftmaxArgs {
  const Csr& graph;
  const void* input;     // scores, or the softmax in the backward
  const void* grad_out;  // null in the forward
  void* out;
  int64_t num_heads;
  DType dtype;
  int threads;
};

struct SegmentSoftmaxArgs {  // see kernels.h; what only the other direction uses is null
  const Csr& segments;
  const void* x;
  const void* t;
  double scale;
  int64_t num_t;
  void* out;
  void* stats;
  const void* grad_out;  // null in the forward
  void* grad_x;
  void* grad_t;
  int64_t width;
  bool constant;
  DType dtype;
  int threads;
};

struct AttentionArgs {    // see kernels.h; what only the other direction uses is null
  const Csr& graph;       // of the forward
  const Csr& transposed;  // of the backward
  const void* x;
  const void* score_src;
  const void* score_dst;
  const EdgeFactor& factor;
  void* out;  // these four: written by the forward, read by the backward
  void* lse;
  void* out_pos;
  void* p_pos;
  const void* grad_out;  // null in the forward
  void* grad_x;
  void* grad_score_src;
  void* grad_score_dst;
  double slope;
  int64_t num_heads;
  int64_t width;
  DType dtype;
  int threads;
};

struct DotAttentionArgs {  // see kernels.h
  const Csr& graph;        // the transposed one for grad_key and grad_value
  const DotAttention& given;
  int threads;
};

struct DotAttentionEndsArgs {  // see kernels.h
  const void* out;
  const void* stats;
  const void* grad_out;
  void* ends;
  int64_t num_rows;
  int64_t num_heads;
  int64_t width;
  DType dtype;
  int threads;
};

struct Gatv2Args {  // see kernels.h; what only the scores or only the sums use is null
  const Csr& graph;
  const void* x;
  const void* y;
  const void* vectors;
  const void* weights;
  void* out;
  void* sums;
  void* products;
  double slope;
  int64_t num_heads;
  int64_t width;
  DType dtype;
  int threads;
};

struct HeadDotsArgs {  // see kernels.h; what only the other direction uses is null
  const void* x;
  const void* vectors;
  void* out;
  const void* grad_out;  // null in the forward
  void* grad_x;
  void* grad_vectors;
  bool add;
  int64_t num_rows;
  int64_t num_vectors;
  int64_t num_heads;
  int64_t width;
  DType dtype;
  int threads;
};

struct NormedLayersArgs {  // see kernels.h; what only the other direction uses is null
  const void* x;
  const void* weight;
  const void* bias;
  const void* gamma;
  const void* beta;
  void* running_mean;
  void* running_var;
  const void* last_weight;
  const void* last_bias;
  const void* hidden;  // these two: written by the forward, read by the backward
  const void* norm;
  void* out;
  const void* grad;  // null in the forward
  void* grad_x;
  void* grad_weight;
  void* grad_gamma;
  void* grad_beta;
  void* grad_last_weight;
  void* grad_last_bias;
  int64_t num_rows;
  int64_t inner;
  int64_t width;
  int64_t outer;
  double eps;
  double momentum;
  int threads;
};

struct MaxkArgs {  // see kernels.h
  const void* x;
  int64_t num_rows;
  const Compressed& kept;
  DType dtype;
  int threads;
};

struct SpgemmArgs {
  const Csr& graph;
  const Compressed& x;
  const void* weight;
  void* out;
  DType dtype;
  const Fused& fused;
  int threads;
};

struct SspmmArgs {
  const Csr& graph;
  const void* grad;
  const Compressed& kept;
  const void* weight;
  const void* row_scale;
  void* grad_values;
  bool by_source;
  DType dtype;
  int threads;
};

struct MessageWalkArgs {  // see kernels.h
  const Csr& graph;
  const MessageProgram& program;
  const void* const* operands;
  void* const* results;
  int threads;
};

#define GNNACCEL_DECLARE(isa)                           \
  namespace isa {                                       \
  void spmm(const SpmmArgs&);                           \
  void spmm_backward(const SpmmBackwardArgs&);          \
  void sddmm(const SddmmArgs&);                         \
  void edge_softmax(const EdgeSoftmaxArgs&);            \
  void segment_softmax(const SegmentSoftmaxArgs&);      \
  void attention(const AttentionArgs&);                 \
  void dot_attention(const DotAttentionArgs&);          \
  void dot_attention_ends(const DotAttentionEndsArgs&); \
  void gatv2(const Gatv2Args&);                         \
  void head_dots(const HeadDotsArgs&);                  \
  void normed_layers(const NormedLayersArgs&);          \
  void maxk(const MaxkArgs&);                           \
  void spgemm(const SpgemmArgs&);                       \
  void sspmm(const SspmmArgs&);                         \
  void message_walk(const MessageWalkArgs&);            \
  }
GNNACCEL_DECLARE(baseline)
GNNACCEL_DECLARE(avx2)
GNNACCEL_DECLARE(avx512)
#undef GNNACCEL_DECLARE

}  // namespace gnnaccel
