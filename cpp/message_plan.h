// How a program of messages is run on the CPU: how many nonzeros at a time, where their values lie, how rows are read
// and written.
#pragma once

#include <algorithm>

#include "isa.h"
#include "rows.h"
#include "simd.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

// Bytes of values of the nonzeros that are worked on together: half a first-level cache.
constexpr int64_t kTileBytes = 24 << 10;
constexpr int64_t kMostInTile = 256;
// The same where rows must be whole, of several rows; and of one: half a second-level cache.
constexpr int64_t kRowsBytes = 128 << 10;
constexpr int64_t kRowBytes = 512 << 10;
constexpr int64_t kPrefetchBytes = 1024;  // of a gathered row; the processor follows a longer one by itself

// A value of the nonzeros of a tile: row t at rows[t], or at flat + t * width.
template <class A>
struct View {
  const A* flat;
  const A* const* rows;

  const A* at(int64_t t, int64_t width) const { return rows ? rows[t] : flat + t * width; }
};

template <class A>
A* align(A* from) {
  const auto address = (reinterpret_cast<uintptr_t>(from) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  return reinterpret_cast<A*>(address);
}

template <class To, class From>
void copy_row(const From* from, To* to, int64_t width) {
  for (int64_t d = 0; d < width; ++d) narrow(static_cast<Acc<To>>(widen(from[d])), to + d);
}

int64_t bytes_of(int32_t dtype, IndexType index_type) {
  if (dtype < 0) return index_type == IndexType::i64 ? 8 : 4;
  return dtype == static_cast<int32_t>(DType::f64) ? 8 : dtype == static_cast<int32_t>(DType::f32) ? 4 : 2;
}

template <class A>
void write_row(const A* from, const MessageOutput& output, void* results, int64_t row) {
  const int64_t at = row * output.width;
  switch (static_cast<DType>(output.dtype)) {
    case DType::f64:
      return copy_row(from, static_cast<double*>(results) + at, output.width);
    case DType::bf16:
      return copy_row(from, static_cast<bf16*>(results) + at, output.width);
    default:
      return copy_row(from, static_cast<float*>(results) + at, output.width);
  }
}

// How rows of a leaf are read: where they lie, or from a copy in the tile.
enum class Access { in_place, copied, fixed };

// What all threads share: the program, and how its leaves are read.
template <class A, class I>
struct Plan {
  const MessageProgram& program;
  CsrOf<I> graph;
  const void* const* operands;
  void* const* results;
  bool whole_rows;          // there are values of rows, so that all nonzeros of a row are taken together
  int64_t tile;             // nonzeros
  int64_t most;             // of a row that is taken whole; and of rows
  int64_t stride;           // the width of the widest value
  Buffer<int64_t> offsets;  // of registers, and behind them of copies of leaves, in the room for a tile; and its size

  explicit Plan(const MessageWalkArgs& a)
      : program(a.program),
        graph(a.graph),
        operands(a.operands),
        results(a.results),
        stride(a.program.width),
        offsets(a.program.num_registers + a.program.num_leaves + 1) {
    const int64_t registers = program.num_registers, count = registers + program.num_leaves;
    std::fill_n(offsets.get(), count + 1, int64_t{0});
    for (int64_t s = 0; s < program.num_steps; ++s) {
      const MessageStep& step = program.steps[s];
      offsets[step.out] = std::max<int64_t>(
          offsets[step.out], step.op == MessageOp::fold || step.op == MessageOp::dot ? step.len : step.width);
    }
    for (int64_t i = 0; i < program.num_leaves; ++i)
      if (access(program.leaves[i]) != Access::in_place) offsets[registers + i] = program.leaves[i].width;
    int64_t numbers = stride;
    for (int64_t i = 0; i < count; ++i) numbers += offsets[i];
    const auto fitting = [&](int64_t bytes) {
      return std::min(kMostInTile, std::max<int64_t>(4, bytes / (numbers * static_cast<int64_t>(sizeof(A)))));
    };
    whole_rows = program.num_overs > 0;
    for (int64_t o = 0; o < program.num_outputs; ++o) whole_rows |= program.outputs[o].reduce == MessageReduce::row;
    tile = fitting(whole_rows ? kRowsBytes : kTileBytes);
    most = whole_rows ? fitting(kRowBytes) : tile;
    // Whole vectors, and one more, so that values do not lie a power of two apart.
    int64_t at = 0;
    for (int64_t i = 0; i <= count; ++i) {
      const int64_t room = (most * offsets[i] + 2 * kLanes<A> - 1) / kLanes<A> * kLanes<A>;
      offsets[i] = at;
      at += room;
    }
  }

  // Rows in place are read by whole vectors, and as they are.
  static Access access(const MessageLeaf& leaf) {
    if (leaf.dtype < 0) return Access::in_place;
    const bool as_is = leaf.dtype == static_cast<int32_t>(sizeof(A) == 8 ? DType::f64 : DType::f32);
    if (as_is && leaf.width % kLanes<A> == 0) return Access::in_place;
    return leaf.target == MessageTarget::c ? Access::fixed : Access::copied;
  }

  // Writes a row of output o: the sum or extremum of its messages, and whose that is.
  void write(int64_t o, int64_t row, int64_t degree, A* values, const I* argmax) const {
    const MessageOutput& output = program.outputs[o];
    if (output.reduce == MessageReduce::mean && degree)
      for (int64_t d = 0; d < output.width; ++d) values[d] /= static_cast<A>(degree);
    write_row(values, output, results[2 * o], row);
    I* const to = static_cast<I*>(results[2 * o + 1]);
    if (!to) return;
    if (degree)
      std::copy_n(argmax, output.width, to + row * output.width);
    else
      std::fill_n(to + row * output.width, output.width, I(-1));
  }

  int64_t room() const { return offsets[program.num_registers + program.num_leaves] + 2 * kLanes<A>; }
};

// Reductions over a row that is longer than a tile, which is walked over once for each level of them: those of lower
// levels are known, those of this one grow by what each tile has.
struct LongRow {
  double* states;  // [num_overs, stride]
  int64_t level;
  bool is_first;  // tile
};

}  // namespace
}  // namespace gnnaccel::GNNACCEL_ISA
