// Products of f32 matrices that a few small panels of memory hold: tiles of the result in registers, operands from the
// caches. For matrices of many rows and at most some hundred columns, which libraries' blocking does not repay.
#pragma once

#include <algorithm>
#include <cstring>

#include "rows.h"
#include "simd.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

constexpr int kL = kLanes<float>;
// Registers: 6 x 4 sums, 4 values of the right operand and one of the left of 32; or 6 x 2, 2 and one of 16.
constexpr int kTall = 6;
constexpr int kWide = kVectorBytes == 64 ? 4 : 2;

inline int64_t padded(int64_t width) { return (width + kL - 1) / kL * kL; }

// A matrix of numbers whose neighbours in a row, and in a column, lie so far apart.
struct Left {
  const float* at;
  int64_t row;
  int64_t column;
};

// `columns` of the result are written, by vectors up to the last one.
struct Result {
  float* at;
  int64_t row;
  int64_t columns;
};

inline void store_first(float* to, Vec<float, kL> value, int64_t count) {
  if (count >= kL) return store<kL>(to, value);
  std::memcpy(to, &value, sizeof(float) * count);
}

// M rows and N vectors of the result: from zero, from `start` (a row of values), or added to what is there.
template <int M, int N, bool kAdd>
[[gnu::always_inline]] inline void tile(Left left, const float* right, int64_t right_row, int64_t depth,
                                        const float* start, Result to) {
  Vec<float, kL> sums[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j)
      sums[i][j] = kAdd ? load<kL>(to.at + i * to.row + j * kL) : start ? load<kL>(start + j * kL) : Vec<float, kL>{};
  const float* value = left.at;
  for (int64_t k = 0; k < depth; ++k) {
    Vec<float, kL> panel[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) panel[j] = load<kL>(right + j * kL);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const Vec<float, kL> factor = splat<kL>(value[i * left.row]);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sums[i][j] += factor * panel[j];
    }
    right += right_row;
    value += left.column;
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      if (j + 1 < N)
        store<kL>(to.at + i * to.row + j * kL, sums[i][j]);
      else
        store_first(to.at + i * to.row + j * kL, sums[i][j], to.columns - j * kL);
    }
}

template <int N, bool kAdd>
void strip(Left left, int64_t rows, const float* right, int64_t right_row, int64_t depth, const float* start,
           Result to) {
  const auto next = [&](int64_t count) {
    left.at += count * left.row;
    to.at += count * to.row;
    rows -= count;
  };
  for (; rows >= kTall; next(kTall)) tile<kTall, N, kAdd>(left, right, right_row, depth, start, to);
  if (rows >= 4) {
    tile<4, N, kAdd>(left, right, right_row, depth, start, to);
    next(4);
  }
  if (rows >= 2) {
    tile<2, N, kAdd>(left, right, right_row, depth, start, to);
    next(2);
  }
  if (rows) tile<1, N, kAdd>(left, right, right_row, depth, start, to);
}

// to [rows, to.columns] = left [rows, depth] @ right [depth, padded(to.columns)], or with kAdd += it; `start` [padded]
// is a row that is added, or null. With kAdd, all padded columns of the result are there to be read and written.
template <bool kAdd>
void multiply(Left left, int64_t rows, const float* right, int64_t right_row, int64_t depth, const float* start,
              Result to) {
  for (int64_t column = 0; column < to.columns; column += kWide * kL) {
    const int64_t rest = to.columns - column;
    const Result piece{to.at + column, to.row, std::min<int64_t>(rest, kWide * kL)};
    const float* from = start ? start + column : nullptr;
    const int64_t vectors = padded(piece.columns) / kL;
    if constexpr (kWide > 2) {
      if (vectors == 4) {
        strip<4, kAdd>(left, rows, right + column, right_row, depth, from, piece);
        continue;
      }
      if (vectors == 3) {
        strip<3, kAdd>(left, rows, right + column, right_row, depth, from, piece);
        continue;
      }
    }
    if (vectors == 2)
      strip<2, kAdd>(left, rows, right + column, right_row, depth, from, piece);
    else
      strip<1, kAdd>(left, rows, right + column, right_row, depth, from, piece);
  }
}

// Rows of `width` at `from` as rows of padded(width), zeros behind.
inline void pad(const float* from, int64_t rows, int64_t width, float* to) {
  const int64_t wide = padded(width);
  for (int64_t row = 0; row < rows; ++row, from += width, to += wide) {
    std::memcpy(to, from, sizeof(float) * width);
    std::fill(to + width, to + wide, 0.0f);
  }
}

// The transposed matrix of `from` [rows, width], its rows padded.
inline void pad_transposed(const float* from, int64_t rows, int64_t width, float* to) {
  const int64_t wide = padded(rows);
  for (int64_t column = 0; column < width; ++column, to += wide) {
    for (int64_t row = 0; row < rows; ++row) to[row] = from[row * width + column];
    std::fill(to + rows, to + wide, 0.0f);
  }
}

}  // namespace
}  // namespace gnnaccel::GNNACCEL_ISA
