// Picks the instruction set of the CPU kernels once, when the library is loaded.
// GNNACCEL_ISA=avx512|avx2|baseline in the environment lowers the choice (for tests and bug reports).
#include "dispatch.h"

#include <cstdlib>
#include <cstring>

#include "isa.h"
#include "kernels.h"

namespace gnnaccel {
namespace {

struct Set {
  const char* name;
  bool supported;
  void (*spmm)(const SpmmArgs&);
  void (*spmm_backward)(const SpmmBackwardArgs&);
  void (*sddmm)(const SddmmArgs&);
  void (*edge_softmax)(const EdgeSoftmaxArgs&);
  void (*segment_softmax)(const SegmentSoftmaxArgs&);
  void (*attention)(const AttentionArgs&);
  void (*dot_attention)(const DotAttentionArgs&);
  void (*dot_attention_ends)(const DotAttentionEndsArgs&);
  void (*gatv2)(const Gatv2Args&);
  void (*head_dots)(const HeadDotsArgs&);
  void (*normed_layers)(const NormedLayersArgs&);
  void (*maxk)(const MaxkArgs&);
  void (*spgemm)(const SpgemmArgs&);
  void (*sspmm)(const SspmmArgs&);
  void (*message_walk)(const MessageWalkArgs&);
};

Set pick() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const Set sets[] = {
      {"avx512", has_avx512, avx512::spmm, avx512::spmm_backward, avx512::sddmm, avx512::edge_softmax,
       avx512::segment_softmax, avx512::attention, avx512::dot_attention, avx512::dot_attention_ends, avx512::gatv2,
       avx512::head_dots, avx512::normed_layers, avx512::maxk, avx512::spgemm, avx512::sspmm, avx512::message_walk},
      {"avx2", has_avx2, avx2::spmm, avx2::spmm_backward, avx2::sddmm, avx2::edge_softmax, avx2::segment_softmax,
       avx2::attention, avx2::dot_attention, avx2::dot_attention_ends, avx2::gatv2, avx2::head_dots,
       avx2::normed_layers, avx2::maxk, avx2::spgemm, avx2::sspmm, avx2::message_walk},
      {"baseline", true, baseline::spmm, baseline::spmm_backward, baseline::sddmm, baseline::edge_softmax,
       baseline::segment_softmax, baseline::attention, baseline::dot_attention, baseline::dot_attention_ends,
       baseline::gatv2, baseline::head_dots, baseline::normed_layers, baseline::maxk, baseline::spgemm, baseline::sspmm,
       baseline::message_walk},
  };
#else
  const Set sets[] = {{"baseline", true, baseline::spmm, baseline::spmm_backward, baseline::sddmm,
                       baseline::edge_softmax, baseline::segment_softmax, baseline::attention, baseline::dot_attention,
                       baseline::dot_attention_ends, baseline::gatv2, baseline::head_dots, baseline::normed_layers,
                       baseline::maxk, baseline::spgemm, baseline::sspmm, baseline::message_walk}};
#endif
  const char* wanted = std::getenv("GNNACCEL_ISA");
  if (wanted)
    for (const Set& set : sets)
      if (set.supported && std::strcmp(set.name, wanted) == 0) return set;
  for (const Set& set : sets)
    if (set.supported) return set;
  return sets[0];
}

const Set chosen = pick();

}  // namespace

const char* isa() { return chosen.name; }

bool is_amd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

void spmm(const Csr& graph, const void* out_rows, const Operand& lhs, const Operand& rhs, void* out, void* arg_lhs,
          void* arg_rhs, int64_t num_feats, Message message, Reduce reduce, DType dtype, double empty_value,
          const Fused& fused, int threads) {
  chosen.spmm({graph, out_rows, lhs, rhs, out, arg_lhs, arg_rhs, num_feats, message, reduce, dtype, empty_value, fused,
               threads});
}

void spmm_backward(const Csr& transposed, const void* x, const void* weight, const void* grad_out, void* grad_x,
                   void* grad_weight, int64_t num_heads, int64_t width, DType dtype, int threads) {
  chosen.spmm_backward({transposed, x, weight, grad_out, grad_x, grad_weight, num_heads, width, dtype, threads});
}

void sddmm(const Csr& graph, const Operand& lhs, Target lhs_target, const Operand& rhs, Target rhs_target, void* out,
           int64_t num_feats, int64_t dot_len, EdgeOp op, DType dtype, int threads) {
  chosen.sddmm({graph, lhs, lhs_target, rhs, rhs_target, out, num_feats, dot_len, op, dtype, threads});
}

void edge_softmax(const Csr& graph, const void* scores, void* out, int64_t num_heads, DType dtype, int threads) {
  chosen.edge_softmax({graph, scores, nullptr, out, num_heads, dtype, threads});
}

void edge_softmax_backward(const Csr& graph, const void* out, const void* grad_out, void* grad_scores,
                           int64_t num_heads, DType dtype, int threads) {
  chosen.edge_softmax({graph, out, grad_out, grad_scores, num_heads, dtype, threads});
}

void segment_softmax(const Csr& segments, const void* x, const void* t, double scale, int64_t num_t, void* out,
                     void* stats, int64_t width, DType dtype, int threads) {
  chosen.segment_softmax(
      {segments, x, t, scale, num_t, out, stats, nullptr, nullptr, nullptr, width, false, dtype, threads});
}

void segment_softmax_backward(const Csr& segments, const void* x, const void* t, double scale, int64_t num_t,
                              const void* stats, const void* grad_out, void* grad_x, void* grad_t, int64_t width,
                              bool constant, DType dtype, int threads) {
  chosen.segment_softmax({segments, x, t, scale, num_t, nullptr, const_cast<void*>(stats), grad_out, grad_x, grad_t,
                          width, constant, dtype, threads});
}

void attention(const Csr& graph, const void* x, const void* score_src, const void* score_dst, const EdgeFactor& factor,
               void* out, void* lse, void* out_pos, void* p_pos, double slope, int64_t num_heads, int64_t width,
               DType dtype, int threads) {
  chosen.attention({graph, graph, x, score_src, score_dst, factor, out, lse, out_pos, p_pos, nullptr, nullptr, nullptr,
                    nullptr, slope, num_heads, width, dtype, threads});
}

void attention_backward(const Csr& transposed, const void* x, const void* score_src, const void* score_dst,
                        const EdgeFactor& factor, const void* out, const void* lse, const void* out_pos,
                        const void* p_pos, const void* grad_out, void* grad_x, void* grad_score_src,
                        void* grad_score_dst, double slope, int64_t num_heads, int64_t width, DType dtype,
                        int threads) {
  const auto saved = [](const void* pointer) { return const_cast<void*>(pointer); };
  chosen.attention({transposed, transposed, x, score_src, score_dst, factor, saved(out), saved(lse), saved(out_pos),
                    saved(p_pos), grad_out, grad_x, grad_score_src, grad_score_dst, slope, num_heads, width, dtype,
                    threads});
}

void dot_attention(const Csr& graph, const DotAttention& given, int threads) {
  chosen.dot_attention({graph, given, threads});
}

void dot_attention_ends(const void* out, const void* stats, const void* grad_out, void* ends, int64_t num_rows,
                        int64_t num_heads, int64_t width, DType dtype, int threads) {
  chosen.dot_attention_ends({out, stats, grad_out, ends, num_rows, num_heads, width, dtype, threads});
}

void gatv2_scores(const Csr& graph, const void* x, const void* y, const void* vectors, void* out, double slope,
                  int64_t num_heads, int64_t width, DType dtype, int threads) {
  chosen.gatv2({graph, x, y, vectors, nullptr, out, nullptr, nullptr, slope, num_heads, width, dtype, threads});
}

void gatv2_sums(const Csr& graph, const void* x, const void* y, const void* vectors, const void* weights, void* sums,
                void* products, double slope, int64_t num_heads, int64_t width, DType dtype, int threads) {
  chosen.gatv2({graph, x, y, vectors, weights, nullptr, sums, products, slope, num_heads, width, dtype, threads});
}

void head_dots(const void* x, const void* vectors, void* out, int64_t num_rows, int64_t num_vectors, int64_t num_heads,
               int64_t width, DType dtype, int threads) {
  chosen.head_dots(
      {x, vectors, out, nullptr, nullptr, nullptr, false, num_rows, num_vectors, num_heads, width, dtype, threads});
}

void head_dots_backward(const void* x, const void* vectors, const void* grad_out, void* grad_x, void* grad_vectors,
                        bool add, int64_t num_rows, int64_t num_vectors, int64_t num_heads, int64_t width, DType dtype,
                        int threads) {
  chosen.head_dots({x, vectors, nullptr, grad_out, grad_x, grad_vectors, add, num_rows, num_vectors, num_heads, width,
                    dtype, threads});
}

void normed_layers(const void* x, const void* weight, const void* bias, const void* gamma, const void* beta,
                   void* running_mean, void* running_var, const void* last_weight, const void* last_bias, void* hidden,
                   void* norm, void* out, int64_t num_rows, int64_t inner, int64_t width, int64_t outer, double eps,
                   double momentum, int threads) {
  chosen.normed_layers({x,       weight,   bias,  gamma,   beta,    running_mean, running_var, last_weight, last_bias,
                        hidden,  norm,     out,   nullptr, nullptr, nullptr,      nullptr,     nullptr,     nullptr,
                        nullptr, num_rows, inner, width,   outer,   eps,          momentum,    threads});
}

void normed_layers_backward(const void* x, const void* weight, const void* last_weight, const void* hidden,
                            const void* norm, const void* grad, void* grad_x, void* grad_weight, void* grad_gamma,
                            void* grad_beta, void* grad_last_weight, void* grad_last_bias, int64_t num_rows,
                            int64_t inner, int64_t width, int64_t outer, int threads) {
  chosen.normed_layers(
      {x,     weight,  nullptr, nullptr, nullptr,     nullptr,    nullptr,   last_weight,      nullptr,        hidden,
       norm,  nullptr, grad,    grad_x,  grad_weight, grad_gamma, grad_beta, grad_last_weight, grad_last_bias, num_rows,
       inner, width,   outer,   0.0,     0.0,         threads});
}

void maxk(const void* x, int64_t num_rows, const Compressed& kept, DType dtype, int threads) {
  chosen.maxk({x, num_rows, kept, dtype, threads});
}

void spgemm(const Csr& graph, const Compressed& x, const void* weight, void* out, DType dtype, const Fused& fused,
            int threads) {
  chosen.spgemm({graph, x, weight, out, dtype, fused, threads});
}

void sspmm(const Csr& graph, const void* grad, const Compressed& kept, const void* weight, const void* row_scale,
           void* grad_values, bool by_source, DType dtype, int threads) {
  chosen.sspmm({graph, grad, kept, weight, row_scale, grad_values, by_source, dtype, threads});
}

void message_walk(const Csr& graph, const MessageProgram& program, const void* const* operands, void* const* results,
                  int threads) {
  chosen.message_walk({graph, program, operands, results, threads});
}

}  // namespace gnnaccel
