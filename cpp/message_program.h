// Programs of elementwise messages as message_walk (kernels.h) takes them. Compiled from expressions by
// gnnaccel/ops/messages/tape.py, which has the same members in the same order.
#pragma once

#include "types.h"

namespace gnnaccel {

// What a step makes, of values of `width` numbers.
enum class MessageOp : int32_t {
  // of two values
  add,
  sub,
  mul,
  div,
  max,
  min,
  gt,
  ge,
  eq,
  keep,  // a != 0 ? b : 0
  // of a value and the number p
  add_p,
  mul_p,
  div_p,
  max_p,
  min_p,
  gt_p,
  ge_p,
  lt_p,
  le_p,
  eq_p,
  rsub_p,
  rdiv_p,
  pow_p,
  leaky_relu_p,
  // of one value
  copy,
  neg,
  abs,
  sign,
  exp,
  expm1,
  log,
  log1p,
  sqrt,
  rsqrt,
  sigmoid,
  tanh,
  relu,
  erf,
  sin,
  cos,
  round_bfloat16,
  round_float32,
  where,   // a ? b : c
  fill,    // p
  expand,  // out[d] = a[(d / div) % len]
  fold,    // out[l] = sum of the a[d] with (d / div) % len == l; `width` is that of a, out has `len`
  dot,     // fold of a * b
  scale,   // a * expand of b
  winner,  // a, a leaf of the index type: 1 where it is the edge id of the nonzero, else 0
  // of whole rows: `len` numbers these two, from 0
  over_sum,  // of a row's nonzeros, a value of the row
  over_max,
  spread,  // a value of rows, a, for each nonzero
};

// Values are registers (0, 1, ...) or leaves (-1, -2, ...: leaf 0, 1, ...).
// of_rows: the value is one of rows, and so are those it is made of, but for over_sum and over_max. level: how many
// reductions over a row, of one another, come before it.
struct MessageStep {
  MessageOp op;
  int32_t out, a, b, c;
  int32_t width;
  int32_t len, div;
  int32_t of_rows, level;
  double p;
};

// As Target; c: the same row for all; row: of rows, for steps that are of_rows.
enum class MessageTarget : int32_t { u = 0, v = 1, e = 2, c = 3, row = 4 };

// One row of `width` numbers of an operand for each nonzero. dtype -1: of the graph's index type.
struct MessageLeaf {
  MessageTarget target;
  int32_t dtype;
  int32_t width;
};

// row: the value is one of rows.
enum class MessageReduce : int32_t { sum = 0, mean = 1, max = 2, min = 3, none = 4, row = 5 };

struct MessageOutput {
  int32_t value;
  MessageReduce reduce;
  int32_t dtype;
  int32_t width;
};

struct MessageProgram {
  const MessageStep* steps;
  const MessageLeaf* leaves;
  const MessageOutput* outputs;
  int64_t num_steps;
  int64_t num_leaves;
  int64_t num_outputs;
  int64_t num_registers;
  int64_t width;       // of the widest value
  int64_t num_overs;   // steps over_sum and over_max
  int64_t num_levels;  // of them
  DType compute;       // f32 or f64
};

}  // namespace gnnaccel
