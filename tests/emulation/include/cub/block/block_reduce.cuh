#pragma once

#include "block_scan.cuh"

namespace cub {

template <class T, int kThreads>
struct BlockReduce : BlockScan<T, kThreads> {
  using BlockScan<T, kThreads>::BlockScan;
  T Sum(T own) {
    T before, total;
    this->ExclusiveSum(own, before, total);
    return emulation::current->thread == 0 ? total : T(-1);  // of no use to other threads
  }
};

}  // namespace cub
