// Tasks over threads. The kernels are compiled once per instruction set, so nothing here may be an inline
// function or template with external linkage: the linker would keep one copy, perhaps one for a CPU that
// this machine does not have. Hence plain functions and an anonymous namespace.
#pragma once

#include <cstdint>

namespace gnnaccel {

// Runs body(context, task) for every task in [0, num_tasks) on at most `threads` threads, in any order.
void run_tasks(int64_t num_tasks, int threads, void (*body)(void*, int64_t), void* context);

// Number of threads worth using for `work` elements: starting a thread costs about what 64k elements do.
int useful_threads(int64_t work, int threads);

// Uses the given GOMP_parallel (the one torch has loaded) instead of starting threads.
void use_openmp(void* gomp_parallel);

namespace {

template <class Body>
void parallel_for(int64_t num_tasks, int threads, const Body& body) {
  if (threads <= 1 || num_tasks <= 1) {
    for (int64_t t = 0; t < num_tasks; ++t) body(t);
    return;
  }
  run_tasks(
      num_tasks, threads, [](void* context, int64_t task) { (*static_cast<const Body*>(context))(task); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace
}  // namespace gnnaccel
