#pragma once

#include "../../cuda_runtime.h"

namespace cub {

template <class T, int kThreads>
struct BlockScan {
  struct TempStorage {
    T given[kThreads];
  };
  explicit BlockScan(TempStorage& storage) : storage(storage) {}
  void ExclusiveSum(T own, T& before, T& total) {
    const int thread = emulation::current->thread;
    storage.given[thread] = own;
    __syncthreads();
    before = total = 0;
    for (int other = 0; other < kThreads; ++other) {
      if (other == thread) before = total;
      total += storage.given[other];
    }
  }

 private:
  TempStorage& storage;
};

}  // namespace cub
