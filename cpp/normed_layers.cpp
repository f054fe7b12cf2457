// Two linear maps with a batch norm and a ReLU between them, and their gradients, in two passes over the rows each, or
// without the norm in one: a tile of rows goes through everything between two sums over all rows while it is in the
// caches.
//
// Sums over rows are made in blocks of a size that the shapes alone decide, and added in order in f64: results do not
// depend on the number of threads.
#include <cmath>

#include "isa.h"
#include "products.h"

namespace gnnaccel::GNNACCEL_ISA {
namespace {

constexpr int64_t kTile = 96;          // rows that stay in the caches; a multiple of kTall
constexpr int64_t kBlock = 4 * kTile;  // rows to a sum of weights' gradients in f32
constexpr int64_t kMaxBlocks = 64;
constexpr int64_t kMaxBytes = int64_t{16} << 20;  // of all blocks' sums

using V = Vec<float, kL>;
using F = const float*;

// A sum of each column over the rows of one tile, in f64 over tiles.
struct Blocks {
  int64_t num_rows;
  int64_t rows;  // of a block
  int64_t count;

  // `values`: of one block's sums in f64.
  Blocks(int64_t num_rows, int64_t values) : num_rows(num_rows) {
    const int64_t most = std::clamp<int64_t>(kMaxBytes / (8 * std::max<int64_t>(values, 1)), 1, kMaxBlocks);
    const int64_t needed = std::clamp<int64_t>((num_rows + kBlock - 1) / kBlock, 1, most);
    rows = ((num_rows + needed - 1) / needed + kTile - 1) / kTile * kTile;
    count = (num_rows + rows - 1) / rows;
  }

  template <class Body>
  void each(int threads, const Body& body) const {
    parallel_for(count, threads,
                 [&](int64_t block) { body(block, block * rows, std::min(num_rows, (block + 1) * rows)); });
  }
};

// Sums of the gradient of a weight [rows, padded(columns)] over the rows of a block.
class WeightSums {
 public:
  WeightSums(int64_t rows, int64_t columns, double* sums) : size_(rows * padded(columns)), sums_(sums), piece_(size_) {
    std::fill(sums_, sums_ + size_, 0.0);
    std::fill(piece_.get(), piece_.get() + size_, 0.0f);
  }
  float* piece() const { return piece_.get(); }
  // After each tile.
  void added(int64_t rows) {
    if ((rows_ += rows) >= kBlock) flush();
  }
  void flush() {
    for (int64_t i = 0; i < size_; ++i) {
      sums_[i] += piece_[i];
      piece_[i] = 0;
    }
    rows_ = 0;
  }

 private:
  int64_t size_;
  int64_t rows_ = 0;
  double* sums_;
  Buffer<float> piece_;
};

// to [rows, columns] = what all blocks have, [count, rows, padded(columns)].
void total(const double* sums, int64_t count, int64_t rows, int64_t columns, float* to) {
  const int64_t wide = padded(columns);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < columns; ++column) {
      double sum = 0;
      for (int64_t block = 0; block < count; ++block) sum += sums[(block * rows + row) * wide + column];
      to[row * columns + column] = static_cast<float>(sum);
    }
}

// mean and sum of squares about it of each column of a tile [rows, width], at moments [2, padded(width)].
void moments_of(F x, int64_t rows, int64_t width, float* moments) {
  const int64_t wide = padded(width);
  const float part = 1.0f / static_cast<float>(rows);
  for (int64_t c = 0; c < width; c += kL) {
    const int64_t count = std::min<int64_t>(kL, width - c);
    const auto at = [&](int64_t row) {
      if (count == kL) return load<kL>(x + row * width + c);
      V value{};
      std::memcpy(&value, x + row * width + c, sizeof(float) * count);
      return value;
    };
    V sum{}, squares{};
    for (int64_t row = 0; row < rows; ++row) sum += at(row);
    const V mean = sum * part;
    for (int64_t row = 0; row < rows; ++row) {
      const V off = at(row) - mean;
      squares += off * off;
    }
    store<kL>(moments + c, mean);
    store<kL>(moments + wide + c, squares);
  }
}

// Rows of `width` as rows of padded(width): themselves, or copies of them in `copy`.
F rows_of(F from, int64_t rows, int64_t width, float* copy) {
  if (width == padded(width)) return from;
  pad(from, rows, width, copy);
  return copy;
}

void forward(const NormedLayersArgs& a) {
  const int64_t n = a.num_rows, inner = a.inner, width = a.width, outer = a.outer;
  const int64_t wide = padded(width), tiles = (n + kTile - 1) / kTile;
  const int threads = useful_threads(n * (inner + outer) * width / 64, a.threads);
  const Buffer<float> maps(inner * wide + width * padded(outer) + wide + padded(outer));
  float *first = maps.get(), *last = first + inner * wide, *bias = last + width * padded(outer), *shift = bias + wide;
  pad_transposed(static_cast<F>(a.weight), width, inner, first);
  pad_transposed(static_cast<F>(a.last_weight), outer, width, last);
  if (a.bias) pad(static_cast<F>(a.bias), 1, width, bias);
  if (a.last_bias) pad(static_cast<F>(a.last_bias), 1, outer, shift);
  auto* hidden = static_cast<float*>(const_cast<void*>(a.hidden));
  if (!a.norm)
    return parallel_for(tiles, threads, [&](int64_t t) {
      const int64_t row = t * kTile, rows = std::min(kTile, n - row);
      const Left left{static_cast<F>(a.x) + row * inner, inner, 1};
      float *at = hidden + row * width, *out = static_cast<float*>(a.out) + row * outer;
      multiply<false>(left, rows, first, wide, inner, a.bias ? bias : nullptr, {at, width, width});
      for (int64_t i = 0; i < rows * width; ++i) at[i] = at[i] < 0.0f ? 0.0f : at[i];  // NaN stays
      multiply<false>({at, width, 1}, rows, last, padded(outer), width, a.last_bias ? shift : nullptr,
                      {out, outer, outer});
    });
  const Buffer<float> moments(tiles * 2 * wide);
  parallel_for(tiles, threads, [&](int64_t t) {
    const int64_t row = t * kTile, rows = std::min(kTile, n - row);
    const Left left{static_cast<F>(a.x) + row * inner, inner, 1};
    multiply<false>(left, rows, first, wide, inner, a.bias ? bias : nullptr, {hidden + row * width, width, width});
    moments_of(hidden + row * width, rows, width, moments.get() + t * 2 * wide);
  });
  const Buffer<float> normed(3 * wide);
  float *mean = normed.get(), *scale = mean + wide, *beta = scale + wide;
  std::fill(mean, mean + 3 * wide, 0.0f);
  auto* norm = static_cast<float*>(const_cast<void*>(a.norm));
  for (int64_t c = 0; c < width; ++c) {
    double sum = 0, squares = 0;
    for (int64_t t = 0; t < tiles; ++t)
      sum += static_cast<double>(moments[t * 2 * wide + c]) * static_cast<double>(std::min(kTile, n - t * kTile));
    const double middle = sum / static_cast<double>(n);
    for (int64_t t = 0; t < tiles; ++t) {
      const double off = moments[t * 2 * wide + c] - middle;
      squares += moments[(t * 2 + 1) * wide + c] + off * off * static_cast<double>(std::min(kTile, n - t * kTile));
    }
    const double inverse = 1 / std::sqrt(squares / static_cast<double>(n) + a.eps);
    norm[c] = mean[c] = static_cast<float>(middle);
    norm[width + c] = scale[c] = static_cast<float>(inverse * static_cast<F>(a.gamma)[c]);
    norm[2 * width + c] = beta[c] = static_cast<F>(a.beta)[c];
    norm[3 * width + c] = static_cast<float>(inverse);
    if (a.running_mean) {
      auto *at = static_cast<float*>(a.running_mean) + c, *of = static_cast<float*>(a.running_var) + c;
      *at = static_cast<float>((1 - a.momentum) * *at + a.momentum * middle);
      *of = static_cast<float>((1 - a.momentum) * *of + a.momentum * squares / static_cast<double>(n - 1));
    }
  }
  parallel_for(tiles, threads, [&](int64_t t) {
    const int64_t row = t * kTile, rows = std::min(kTile, n - row);
    const Buffer<float> tile(kTile * wide);
    const F from = rows_of(hidden + row * width, rows, width, tile.get());
    for (int64_t c = 0; c < wide; c += kL) {
      const V middle = load<kL>(mean + c), factor = load<kL>(scale + c), start = load<kL>(beta + c);
      for (int64_t i = c; i < rows * wide; i += wide) {
        const V value = (load<kL>(from + i) - middle) * factor + start;
        store<kL>(tile.get() + i, value < 0.0f ? V{} : value);  // NaN stays
      }
    }
    float* out = static_cast<float*>(a.out) + row * outer;
    multiply<false>({tile.get(), wide, 1}, rows, last, padded(outer), width, a.last_bias ? shift : nullptr,
                    {out, outer, outer});
  });
}

// Adds the rows of x [rows, width] up, onto sums.
void add_rows(F x, int64_t rows, int64_t width, double* sums) {
  const Buffer<float> piece(width);
  std::fill(piece.get(), piece.get() + width, 0.0f);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t c = 0; c < width; ++c) piece[c] += x[row * width + c];
  for (int64_t c = 0; c < width; ++c) sums[c] += piece[c];
}

void backward_without_norm(const NormedLayersArgs& a) {
  const int64_t n = a.num_rows, inner = a.inner, width = a.width, outer = a.outer;
  const int64_t wide = padded(width), wide_inner = padded(inner);
  const int threads = useful_threads(n * (inner + outer) * width / 32, a.threads);
  const Buffer<float> maps(outer * wide + width * wide_inner);
  float *last = maps.get(), *first = last + outer * wide;
  pad(static_cast<F>(a.last_weight), outer, width, last);
  if (a.grad_x) pad(static_cast<F>(a.weight), width, inner, first);
  const int64_t of_last = a.grad_last_weight ? outer : 0, of_first = a.grad_weight ? width : 0;
  const Blocks blocks(n, outer * wide + width * wide_inner);
  const Buffer<double> sums(blocks.count * (of_last * wide + of_first * wide_inner + wide + outer));
  double* first_sums = sums.get() + blocks.count * of_last * wide;
  double *shifts = first_sums + blocks.count * of_first * wide_inner, *last_shifts = shifts + blocks.count * wide;
  blocks.each(threads, [&](int64_t block, int64_t row, int64_t end) {
    const Buffer<float> gates(kTile * wide), copy(kTile * std::max(wide, wide_inner));
    WeightSums last_weights(of_last, width, sums.get() + block * of_last * wide);
    WeightSums weights(of_first, inner, first_sums + block * of_first * wide_inner);
    std::fill(shifts + block * wide, shifts + (block + 1) * wide, 0.0);
    std::fill(last_shifts + block * outer, last_shifts + (block + 1) * outer, 0.0);
    for (; row < end; row += kTile) {
      const int64_t rows = std::min(kTile, end - row);
      const F grad = static_cast<F>(a.grad) + row * outer;
      multiply<false>({grad, outer, 1}, rows, last, wide, outer, nullptr, {gates.get(), wide, wide});
      const F hidden = rows_of(static_cast<F>(a.hidden) + row * width, rows, width, copy.get());
      for (int64_t i = 0; i < rows * wide; i += kL)
        store<kL>(gates.get() + i, load<kL>(hidden + i) <= 0.0f ? V{} : load<kL>(gates.get() + i));
      if (a.grad_beta) add_rows(gates.get(), rows, wide, shifts + block * wide);
      if (a.grad_last_bias) add_rows(grad, rows, outer, last_shifts + block * outer);
      if (of_last)
        multiply<true>({grad, 1, outer}, outer, hidden, wide, rows, nullptr, {last_weights.piece(), wide, wide});
      if (of_first) {
        const F x = rows_of(static_cast<F>(a.x) + row * inner, rows, inner, copy.get());
        multiply<true>({gates.get(), 1, wide}, width, x, wide_inner, rows, nullptr,
                       {weights.piece(), wide_inner, wide_inner});
      }
      if (a.grad_x)
        multiply<false>({gates.get(), wide, 1}, rows, first, wide_inner, width, nullptr,
                        {static_cast<float*>(a.grad_x) + row * inner, inner, inner});
      last_weights.added(rows);
      weights.added(rows);
    }
    last_weights.flush();
    weights.flush();
  });
  if (of_last) total(sums.get(), blocks.count, outer, width, static_cast<float*>(a.grad_last_weight));
  if (of_first) total(first_sums, blocks.count, width, inner, static_cast<float*>(a.grad_weight));
  if (a.grad_beta) total(shifts, blocks.count, 1, width, static_cast<float*>(a.grad_beta));
  for (int64_t c = 0; a.grad_last_bias && c < outer; ++c) {
    double sum = 0;
    for (int64_t block = 0; block < blocks.count; ++block) sum += last_shifts[block * outer + c];
    static_cast<float*>(a.grad_last_bias)[c] = static_cast<float>(sum);
  }
}

void backward(const NormedLayersArgs& a) {
  const int64_t n = a.num_rows, inner = a.inner, width = a.width, outer = a.outer;
  const int64_t wide = padded(width), wide_inner = padded(inner);
  const int threads = useful_threads(n * (inner + outer) * width / 32, a.threads);
  const Buffer<float> maps(outer * wide + width * wide_inner);
  float *last = maps.get(), *first = last + outer * wide;
  pad(static_cast<F>(a.last_weight), outer, width, last);
  if (a.grad_x) pad(static_cast<F>(a.weight), width, inner, first);
  // What the norm is given lies in grad_x until that is made of it, if rows are as wide.
  const bool apart = !a.grad_x || inner != wide;
  const Buffer<float> normed(4 * wide), own(apart ? n * wide : 0);
  float* between = apart ? own.get() : static_cast<float*>(a.grad_x);
  std::fill(normed.get(), normed.get() + 4 * wide, 0.0f);
  for (int64_t i = 0; i < 4; ++i)
    std::memcpy(normed.get() + i * wide, static_cast<F>(a.norm) + i * width, sizeof(float) * width);
  const float *mean = normed.get(), *scale = mean + wide, *beta = scale + wide, *inverse = beta + wide;

  const Blocks blocks(n, std::max(outer * wide, width * wide_inner));
  const int64_t vectors = 2 * wide + padded(outer);  // sums of the norm's gradients, and of grad
  const Buffer<double> columns(blocks.count * vectors);
  const Buffer<double> sums(
      a.grad_last_weight || a.grad_weight ? blocks.count * std::max(outer * wide, width * wide_inner) : 0);
  blocks.each(threads, [&](int64_t block, int64_t row, int64_t end) {
    double* totals = columns.get() + block * vectors;
    std::fill(totals, totals + vectors, 0.0);
    const Buffer<float> values(kTile * wide), of_columns(2 * wide);
    WeightSums weights(a.grad_last_weight ? outer : 0, width, sums.get() + block * outer * wide);
    for (; row < end; row += kTile) {
      const int64_t rows = std::min(kTile, end - row);
      const float* grad = static_cast<F>(a.grad) + row * outer;
      float* gates = between + row * wide;
      multiply<false>({grad, outer, 1}, rows, last, wide, outer, nullptr, {gates, wide, wide});
      const F hidden = rows_of(static_cast<F>(a.hidden) + row * width, rows, width, values.get());
      for (int64_t c = 0; c < wide; c += kL) {
        const V middle = load<kL>(mean + c), factor = load<kL>(scale + c), start = load<kL>(beta + c);
        V sum{}, products{};
        for (int64_t i = c; i < rows * wide; i += wide) {
          const V off = load<kL>(hidden + i) - middle;
          const V value = off * factor + start;
          const V gate = value <= 0.0f ? V{} : load<kL>(gates + i);  // NaN lets it pass
          store<kL>(values.get() + i, value < 0.0f ? V{} : value);
          store<kL>(gates + i, gate);
          sum += gate;
          products += gate * off;
        }
        store<kL>(of_columns.get() + c, sum);
        store<kL>(of_columns.get() + wide + c, products);
      }
      for (int64_t c = 0; c < 2 * wide; ++c) totals[c] += of_columns[c];
      if (a.grad_last_bias) add_rows(grad, rows, outer, totals + 2 * wide);
      if (a.grad_last_weight) {
        multiply<true>({grad, 1, outer}, outer, values.get(), wide, rows, nullptr, {weights.piece(), wide, wide});
        weights.added(rows);
      }
    }
    weights.flush();
  });
  if (a.grad_last_weight) total(sums.get(), blocks.count, outer, width, static_cast<float*>(a.grad_last_weight));
  const Buffer<float> slopes(2 * wide);  // what each row's gradient loses: a constant, and a part of its deviation
  std::fill(slopes.get(), slopes.get() + 2 * wide, 0.0f);
  const auto of_all = [&](int64_t column) {
    double sum = 0;
    for (int64_t block = 0; block < blocks.count; ++block) sum += columns[block * vectors + column];
    return sum;
  };
  for (int64_t c = 0; c < width; ++c) {
    const double sum = of_all(c), products = of_all(wide + c) * inverse[c];
    static_cast<float*>(a.grad_beta)[c] = static_cast<float>(sum);
    static_cast<float*>(a.grad_gamma)[c] = static_cast<float>(products);
    slopes[c] = static_cast<float>(sum / static_cast<double>(n));
    slopes[wide + c] = static_cast<float>(products * inverse[c] / static_cast<double>(n));
  }
  if (a.grad_last_bias)
    for (int64_t c = 0; c < outer; ++c)
      static_cast<float*>(a.grad_last_bias)[c] = static_cast<float>(of_all(2 * wide + c));
  if (!a.grad_x && !a.grad_weight) return;

  blocks.each(threads, [&](int64_t block, int64_t row, int64_t end) {
    const Buffer<float> copy(a.grad_weight ? kTile * wide_inner : 0), values(kTile * wide);
    WeightSums weights(a.grad_weight ? width : 0, inner, sums.get() + block * width * wide_inner);
    for (; row < end; row += kTile) {
      const int64_t rows = std::min(kTile, end - row);
      const float* gates = between + row * wide;
      const F hidden = rows_of(static_cast<F>(a.hidden) + row * width, rows, width, values.get());
      for (int64_t c = 0; c < wide; c += kL) {
        const V middle = load<kL>(mean + c), factor = load<kL>(scale + c);
        const V constant = load<kL>(slopes.get() + c), part = load<kL>(slopes.get() + wide + c);
        for (int64_t i = c; i < rows * wide; i += wide) {
          const V off = load<kL>(hidden + i) - middle;
          store<kL>(values.get() + i, (load<kL>(gates + i) - constant - off * part) * factor);
        }
      }
      if (a.grad_weight) {
        const F x = rows_of(static_cast<F>(a.x) + row * inner, rows, inner, copy.get());
        multiply<true>({values.get(), 1, wide}, width, x, wide_inner, rows, nullptr,
                       {weights.piece(), wide_inner, wide_inner});
        weights.added(rows);
      }
      if (a.grad_x)
        multiply<false>({values.get(), wide, 1}, rows, first, wide_inner, width, nullptr,
                        {static_cast<float*>(a.grad_x) + row * inner, inner, inner});
    }
    weights.flush();
  });
  if (a.grad_weight) total(sums.get(), blocks.count, width, inner, static_cast<float*>(a.grad_weight));
}

}  // namespace

void normed_layers(const NormedLayersArgs& a) {
  if (!a.grad)
    forward(a);
  else if (a.norm)
    backward(a);
  else
    backward_without_norm(a);
}

}  // namespace gnnaccel::GNNACCEL_ISA
