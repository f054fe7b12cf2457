// What neighbour sampling on the GPU is made of: the CPU's random numbers (cpp/sampling.h), Floyd's algorithm by a
// group of lanes, and where each node first appears.
#pragma once

#include "common.cuh"

namespace gnnaccel {
namespace cuda {
namespace sample_impl {

constexpr uint32_t kNone = ~0u;

// Number `counter` of a row, brought below `bound` (Lemire, 2019). False if it has to be passed over, so that every
// value is exactly as likely.
__device__ __forceinline__ bool drawn_below(uint64_t row_seed, uint64_t counter, uint64_t bound, uint64_t& value) {
  const uint64_t number = splitmix64(row_seed, counter), low = number * bound;
  value = __umul64hi(number, bound);
  return low >= bound || low >= (0 - bound) % bound;
}

// The draw of each lane of a group of L below its own bound, as if they came one after the other: those from one on
// that has to be passed over take the next number. Lanes begin at `counter`; `passed` are those passed over before, in
// and out. All lanes of the warp call it together.
template <int L>
__device__ __forceinline__ uint64_t draw(bool active, uint64_t bound, uint64_t row_seed, uint64_t counter,
                                         uint64_t& passed) {
  const int lane = threadIdx.x % L;
  uint64_t value = 0, more = passed;
  for (;;) {
    const bool again = active && !drawn_below(row_seed, counter + more, bound, value);
    if (!__any_sync(~0u, again)) break;
    const unsigned those = group_ballot<L>(again);
    if (those && lane >= __ffs(those) - 1) ++more;
  }
  passed = __shfl_sync(~0u, more, L - 1, L);
  return value;
}

// Floyd's algorithm takes a draw, or where that was taken before, the draw's highest number, its top. The draw of a
// lane was taken if one before has drawn the same (`replaced` says so), or if it is the top of one before that took its
// top; that one is lane `next`, -1 for none. Follows these, doubling.
template <int L>
__device__ __forceinline__ bool follow(bool replaced, int next) {
  const int lane = threadIdx.x % L;
#pragma unroll
  for (int length = 1; length < L; length *= 2) {
    const int from = next < 0 ? lane : next;
    const bool its = __shfl_sync(~0u, static_cast<int>(replaced), from, L) != 0;
    const int further = __shfl_sync(~0u, next, from, L);
    if (next >= 0) {
      replaced = replaced || its;
      next = further;
    }
  }
  return replaced;
}

// Where each node first appears: a node's least key. The outcome depends on no order of the threads. A cell for each
// node of the graph, all kNone at first.
template <typename I>
class Cells {
 public:
  Cells(void* table, int64_t) : keys_(static_cast<uint32_t*>(table)) {}
  __device__ __forceinline__ void enter(I node, uint32_t key) const { atomicMin(keys_ + node, key); }
  __device__ __forceinline__ uint32_t find(I node) const { return keys_[node]; }

 private:
  uint32_t* keys_;
};

// The same by hashing, for graphs of more nodes than a batch may hold. All bytes 0xFF at first. There are twice as many
// slots as nodes.
template <typename I>
class Slots {
 public:
  Slots(void* table, int64_t slots)
      : nodes_(static_cast<Word*>(table)), keys_(reinterpret_cast<uint32_t*>(nodes_ + slots)), last_(slots - 1) {}
  __device__ __forceinline__ void enter(I node, uint32_t key) const {
    const Word word = static_cast<Word>(node), empty = ~Word{0};
    for (uint64_t at = home(word);; at = (at + 1) & last_) {
      const Word there = atomicCAS(nodes_ + at, empty, word);
      if (there != empty && there != word) continue;
      atomicMin(keys_ + at, key);
      return;
    }
  }
  __device__ __forceinline__ uint32_t find(I node) const {  // one that has been entered
    uint64_t at = home(static_cast<Word>(node));
    while (nodes_[at] != static_cast<Word>(node)) at = (at + 1) & last_;
    return keys_[at];
  }

 private:
  using Word = std::conditional_t<sizeof(I) == 4, unsigned, unsigned long long>;
  __device__ __forceinline__ uint64_t home(Word node) const { return splitmix64(0, node) & last_; }
  Word* nodes_;
  uint32_t* keys_;
  uint64_t last_;
};

}  // namespace sample_impl
}  // namespace cuda
}  // namespace gnnaccel
