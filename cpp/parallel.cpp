// Threads: torch's own OpenMP pool where there is one, else plain threads started for the call.
#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

namespace gnnaccel {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
GompParallel gomp_parallel = nullptr;

struct Job {
  std::atomic<int64_t> next{0};
  int64_t num_tasks;
  void (*body)(void*, int64_t);
  void* context;
  std::atomic<bool> failed{false};
  std::exception_ptr error;
};

// An exception (memory that is not to be had) must not leave a thread: it ends the job and is thrown by run_tasks.
void work(void* pointer) {
  auto* job = static_cast<Job*>(pointer);
  try {
    for (int64_t t = job->next++; t < job->num_tasks; t = job->next++) job->body(job->context, t);
  } catch (...) {
    if (!job->failed.exchange(true)) job->error = std::current_exception();
    job->next = job->num_tasks;
  }
}

}  // namespace

void use_openmp(void* function) { gomp_parallel = reinterpret_cast<GompParallel>(function); }

int useful_threads(int64_t work, int threads) {
  return static_cast<int>(std::clamp<int64_t>(work / 65536 + 1, 1, std::max(threads, 1)));
}

void run_tasks(int64_t num_tasks, int threads, void (*body)(void*, int64_t), void* context) {
  Job job;
  job.num_tasks = num_tasks;
  job.body = body;
  job.context = context;
  threads = static_cast<int>(std::min<int64_t>(threads, num_tasks));
  if (gomp_parallel) {
    gomp_parallel(work, &job, static_cast<unsigned>(threads), 0);
  } else {
    std::vector<std::thread> helpers;
    for (int t = 1; t < threads; ++t) helpers.emplace_back(work, &job);
    work(&job);
    for (auto& helper : helpers) helper.join();
  }
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace gnnaccel
