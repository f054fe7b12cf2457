// What sampling kernels share: growing arrays, random numbers, the numbering of nodes in order of appearance.
#pragma once

#include <cmath>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace gnnaccel {
namespace {

constexpr int64_t kMostNodes = int64_t{1} << 31;  // of one type in a sample: a place is 32 bits in a table

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

// The elements of an Array while it grows. Room is kept by realloc, which moves pages and not bytes where there are
// many.
template <class I>
class Growing {
 public:
  Growing() : array_(std::make_shared<Array>()) { array_->width = sizeof(I); }
  I* data() { return static_cast<I*>(array_->data); }
  int64_t size() const { return array_->size; }
  void reserve(int64_t more) {
    const int64_t wanted = size() + more;
    if (wanted <= room_) return;
    void* moved = std::realloc(array_->data, static_cast<size_t>(wanted) * sizeof(I));
    if (!moved) throw std::bad_alloc();
    array_->data = moved;
    room_ = wanted;
  }
  // Room for `more` elements, which are there from now on; not initialised.
  I* extend(int64_t more) {
    reserve(more);
    I* first = data() + size();
    array_->size += more;
    return first;
  }
  void push(I value) { data()[array_->size++] = value; }  // into reserved room
  std::shared_ptr<Array> release() {
    if (room_ > size() && size() > 0)
      if (void* moved = std::realloc(array_->data, static_cast<size_t>(size()) * sizeof(I))) array_->data = moved;
    return std::move(array_);
  }

 private:
  std::shared_ptr<Array> array_;
  int64_t room_ = 0;
};

// Random numbers of one row: they depend on nothing but the batch's seed and the row's number.
class Random {
 public:
  Random(uint64_t seed, uint64_t row) : seed_(splitmix64(seed, row)) {}
  // Uniform in [0, n), every number exactly as likely (Lemire, 2019).
  int64_t below(int64_t n) {
    const auto bound = static_cast<uint64_t>(n);
    unsigned __int128 product = static_cast<unsigned __int128>(next()) * bound;
    if (static_cast<uint64_t>(product) < bound) {
      const uint64_t least = (0 - bound) % bound;
      while (static_cast<uint64_t>(product) < least) product = static_cast<unsigned __int128>(next()) * bound;
    }
    return static_cast<int64_t>(product >> 64);
  }
  double unit() { return static_cast<double>((next() >> 11) + 1) * 0x1p-53; }  // in (0, 1]

 private:
  uint64_t next() { return splitmix64(seed_, counter_++); }
  uint64_t seed_;
  uint64_t counter_ = 0;
};

// Where each node stands among those seen so far: a table with one entry per node of the graph, which is kept between
// batches, an entry being the stamp of its batch (upper half) and a place (lower half). For one tree.
class Table {
 public:
  Table(uint64_t* entries, int64_t stamp) : entries_(entries), stamp_(static_cast<uint64_t>(stamp)) {}
  void prefetch(int64_t node, int64_t) const { __builtin_prefetch(entries_ + node, 1); }
  // Its place; `next` is entered for a node that has none.
  int64_t enter(int64_t node, int64_t, int64_t next) {
    uint64_t& entry = entries_[node];
    if (entry >> 32 == stamp_) return static_cast<uint32_t>(entry);
    entry = stamp_ << 32 | static_cast<uint64_t>(next);
    return next;
  }
  int64_t find(int64_t node, int64_t) const {  // or -1
    const uint64_t entry = entries_[node];
    return entry >> 32 == stamp_ ? static_cast<int64_t>(entry & 0xffffffffu) : -1;
  }

 private:
  uint64_t* entries_;
  uint64_t stamp_;
};

// The same for nodes of several trees, or of a type whose number of nodes is not known or too large.
class Hash {
 public:
  void prefetch(int64_t node, int64_t tree) const { __builtin_prefetch(&slots_[home(node, tree)], 1); }
  int64_t enter(int64_t node, int64_t tree, int64_t next) {
    Slot* slot = look_up(node, tree);
    if (slot->place >= 0) return slot->place;
    *slot = {node, static_cast<int32_t>(tree), static_cast<int32_t>(next)};
    if (2 * ++used_ > slots_.size()) grow();
    return next;
  }
  int64_t find(int64_t node, int64_t tree) const { return const_cast<Hash*>(this)->look_up(node, tree)->place; }

 private:
  struct Slot {
    int64_t node = 0;
    int32_t tree = 0;
    int32_t place = -1;
  };
  size_t home(int64_t node, int64_t tree) const {
    return splitmix64(static_cast<uint64_t>(tree) << 40, static_cast<uint64_t>(node)) & (slots_.size() - 1);
  }
  Slot* look_up(int64_t node, int64_t tree) {
    size_t at = home(node, tree);
    while (slots_[at].place >= 0 && (slots_[at].node != node || slots_[at].tree != tree))
      at = (at + 1) & (slots_.size() - 1);
    return &slots_[at];
  }
  void grow() {
    std::vector<Slot> old(4 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.place >= 0) *look_up(slot.node, slot.tree) = slot;
  }
  std::vector<Slot> slots_ = std::vector<Slot>(1024);
  size_t used_ = 0;
};

}  // namespace
}  // namespace gnnaccel
