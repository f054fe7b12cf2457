// CUDA for one CPU core, as far as cuda/ uses it: kernels run as they are written, thread by thread, so that they can be
// tested, and watched by sanitizers, on a machine without a GPU.
//
// The blocks of a grid run one after the other. The threads of a block are fibers: each runs until it reaches a barrier
// or a warp's collective, and the next one goes on, in a random order. All threads of a warp must meet in the same
// collective, and all live threads of a block at the same barrier; else the process ends with a message. No memory is
// cached and nothing runs at the same time, so missing barriers show only where an order of threads exposes them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
struct CUstream_st;
typedef CUstream_st* cudaStream_t;
inline const char* cudaGetErrorString(cudaError_t) { return "invalid value"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 1, cudaDevAttrL2CacheSize = 4096 };
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) { return *value = which, cudaSuccess; }
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class K>
cudaError_t cudaFuncSetAttribute(K, cudaFuncAttribute, int bytes) {
  return bytes <= 131072 ? cudaSuccess : cudaErrorInvalidValue;
}
constexpr unsigned cudaHostAllocPortable = 1;
inline cudaError_t cudaHostAlloc(void** to, size_t bytes, unsigned) { return *to = std::malloc(bytes), cudaSuccess; }
inline cudaError_t cudaFreeHost(void* at) { return std::free(at), cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other

inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }

template <class T>
inline T __ldg(const T* from) {
  return *from;
}
using std::isfinite;
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned which = selector >> (4 * i) & 7u;
    result |= ((which < 4 ? a : b) >> (8 * (which % 4)) & 0xFFu) << (8 * i);
  }
  return result;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline long long __double_as_longlong(double value) {
  long long bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __viaddmin_u32(unsigned a, unsigned b, unsigned c) { return a + b < c ? a + b : c; }
inline unsigned __viaddmax_u32(unsigned a, unsigned b, unsigned c) { return a + b > c ? a + b : c; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }  // 0 of NaN
template <class T>
inline T atomicAdd(T* at, T value) {
  const T before = *at;
  *at += value;
  return before;
}
template <class T>
inline T atomicOr(T* at, T value) {
  const T before = *at;
  *at |= value;
  return before;
}
template <class T>
inline T atomicMax(T* at, T value) {
  const T before = *at;
  if (value > before) *at = value;
  return before;
}
template <class T>
inline T atomicMin(T* at, T value) {
  const T before = *at;
  if (value < before) *at = value;
  return before;
}
template <class T>
inline T atomicCAS(T* at, T expected, T value) {
  const T before = *at;
  if (before == expected) *at = value;
  return before;
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}

namespace emulation {

constexpr size_t kStackBytes = 96 * 1024;
constexpr int kWarp = 32;

struct Fiber {
  void* stack_pointer;
  char* stack;
  bool done;
  int thread;
};
struct Warp {
  int arrived = 0;
  unsigned generation = 0;
  uint64_t given[kWarp], taken[kWarp];
  int site[kWarp];
};

inline dim3 block_index, block_size, grid_size;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline void* scheduler;  // its stack pointer
inline Fiber* current;
inline int live, waiting, waiting_site;  // threads of the block; at its barrier
inline unsigned barrier_generation;
inline bool progress;
inline std::mt19937 order_of_threads(1);
inline void (*body)(void*);
inline void* body_arguments;

extern "C" void emulation_switch(void** save_here, void* continue_there);  // switch.S

[[noreturn]] inline void die(const char* why) {
  std::fprintf(stderr, "emulated kernel: %s (block %u, %u, thread %d)\n", why, block_index.x, block_index.y,
               current ? current->thread : -1);
  std::abort();
}

inline void yield() { emulation_switch(&current->stack_pointer, scheduler); }

inline void release_barrier() {
  if (waiting == 0 || waiting != live) return;
  waiting = 0;
  ++barrier_generation;
  progress = true;
}

inline void run_thread() {
  body(body_arguments);
  current->done = true;
  --live;
  progress = true;
  release_barrier();
  yield();
  die("a thread that had ended went on");
}

inline void syncthreads(int site) {
  const unsigned generation = barrier_generation;
  if (waiting && waiting_site != site) die("threads wait at different barriers");
  waiting_site = site;
  ++waiting;
  progress = true;
  release_barrier();
  while (barrier_generation == generation) yield();
}

inline bool flagged;
inline bool syncthreads_or(bool flag, int site) {
  flagged = flagged || flag;
  syncthreads(site);
  const bool any = flagged;
  syncthreads(site);
  flagged = false;
  syncthreads(site);
  return any;
}

// All lanes of a warp hand in `value` and see what all have handed in.
template <class T, class F>
auto collective(T value, int site, F result) {
  static_assert(sizeof(T) <= 8, "a collective moves up to 8 bytes a lane");
  const int lane = current->thread % kWarp;
  Warp& warp = warps[current->thread / kWarp];
  warp.given[lane] = 0;
  std::memcpy(&warp.given[lane], &value, sizeof value);
  warp.site[lane] = site;
  const unsigned generation = warp.generation;
  progress = true;
  if (++warp.arrived == kWarp) {
    for (int other = 1; other < kWarp; ++other) {
      if (warp.site[other] != warp.site[0]) die("the lanes of a warp are at different collectives");
    }
    std::memcpy(warp.taken, warp.given, sizeof warp.given);
    warp.arrived = 0;
    ++warp.generation;
  } else {
    while (warp.generation == generation) yield();
  }
  return result(warp.taken, lane);
}

template <class T>
T read(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
T shuffle(T value, int from, int width, int site) {
  return collective(value, site, [&](const uint64_t* all, int lane) {
    return read<T>(all[lane / width * width + (from & (width - 1))]);
  });
}
template <class T>
T shuffle_xor(T value, int mask, int site) {
  return collective(value, site, [&](const uint64_t* all, int lane) { return read<T>(all[lane ^ mask]); });
}
template <class T>
T shuffle_up(T value, int lanes, int site) {
  return collective(value, site, [&](const uint64_t* all, int lane) { return read<T>(all[lane < lanes ? lane : lane - lanes]); });
}
inline unsigned ballot(bool flag, int site) {
  return collective<uint64_t>(flag, site, [&](const uint64_t* all, int) {
    unsigned bits = 0;
    for (int lane = 0; lane < kWarp; ++lane) bits |= static_cast<unsigned>(all[lane] != 0) << lane;
    return bits;
  });
}
template <class T>
unsigned match(T value, int site) {
  return collective(value, site, [&](const uint64_t* all, int own) {
    unsigned bits = 0;
    for (int lane = 0; lane < kWarp; ++lane) bits |= static_cast<unsigned>(all[lane] == all[own]) << lane;
    return bits;
  });
}

struct Configuration {
  dim3 grid, block;
  Configuration(dim3 grid, dim3 block, int = 0, cudaStream_t = nullptr) : grid(grid), block(block) {}
};

// kernel<<<configuration>>>(arguments), which emulate.py rewrites to this.
template <class Kernel, class... Arguments>
void launch(Configuration of, Kernel kernel, const Arguments&... arguments) {
  auto call = [&] { kernel(arguments...); };
  body = [](void* at) { (*static_cast<decltype(call)*>(at))(); };
  body_arguments = &call;
  block_size = of.block;
  grid_size = of.grid;
  if (of.grid.x == 0 || of.grid.y == 0 || of.grid.y > 65535 || of.block.x > 1024) die("no GPU takes such a grid");
  if (of.block.x % kWarp) die("a block that is no whole number of warps");
  const int threads = static_cast<int>(of.block.x);
  while (static_cast<int>(fibers.size()) < threads) {
    char* stack = static_cast<char*>(std::aligned_alloc(64, kStackBytes));
    fibers.push_back({nullptr, stack, true, static_cast<int>(fibers.size())});
  }
  std::vector<int> order(threads);
  for (unsigned y = 0; y < of.grid.y; ++y) {
    for (unsigned x = 0; x < of.grid.x; ++x) {
      block_index = dim3(x, y);
      warps.assign(threads / kWarp, Warp());
      live = threads;
      waiting = 0;
      for (int i = 0; i < threads; ++i) {
        order[i] = i;
        fibers[i].done = false;
        auto* top = reinterpret_cast<uint64_t*>(fibers[i].stack + kStackBytes - 64);
        *--top = 0;  // where run_thread would return to
        *--top = reinterpret_cast<uint64_t>(&run_thread);
        for (int saved = 0; saved < 6; ++saved) *--top = 0;  // the registers that a switch restores
        fibers[i].stack_pointer = top;
      }
      std::shuffle(order.begin(), order.end(), order_of_threads);
      while (live) {
        progress = false;
        for (int i : order) {
          if (fibers[i].done) continue;
          current = &fibers[i];
          emulation_switch(&scheduler, current->stack_pointer);
        }
        current = nullptr;
        if (!progress) die("all threads wait");
      }
    }
  }
}

}  // namespace emulation

#define blockIdx emulation::block_index
#define blockDim emulation::block_size
#define gridDim emulation::grid_size
#define threadIdx (dim3(emulation::current->thread, 0, 0))
#define __syncthreads() emulation::syncthreads(__LINE__)
#define __syncthreads_or(flag) emulation::syncthreads_or(flag, __LINE__)
#define EMULATION_SHUFFLE4(mask, value, from, width) emulation::shuffle(value, from, width, __LINE__)
#define EMULATION_SHUFFLE3(mask, value, from) emulation::shuffle(value, from, 32, __LINE__)
#define EMULATION_PICK(a, b, c, d, NAME, ...) NAME
#define __shfl_sync(...) EMULATION_PICK(__VA_ARGS__, EMULATION_SHUFFLE4, EMULATION_SHUFFLE3, 0)(__VA_ARGS__)
#define __shfl_xor_sync(mask, value, lanes) emulation::shuffle_xor(value, lanes, __LINE__)
#define __shfl_up_sync(mask, value, lanes) emulation::shuffle_up(value, lanes, __LINE__)
#define __syncwarp() static_cast<void>(emulation::ballot(true, __LINE__))
#define __ballot_sync(mask, flag) emulation::ballot(flag, __LINE__)
#define __match_any_sync(mask, value) emulation::match(value, __LINE__)
#define __any_sync(mask, flag) (emulation::ballot(flag, __LINE__) != 0)
#define __all_sync(mask, flag) (emulation::ballot(flag, __LINE__) == ~0u)

namespace emulation {

inline float tf32(uint32_t bits) { return __uint_as_float(bits & 0xFFFFE000u); }

inline uint32_t to_tf32(float value) {
  const uint32_t bits = __float_as_uint(value);
  return std::isfinite(value) ? (bits + 0x1000u) & 0xFFFFE000u : bits;
}

// cp.async of 16 bytes, of which so many are there.
inline void copy_ahead(void* to, const void* from, int bytes) {
  std::memset(to, 0, 16);
  std::memcpy(to, from, bytes);
}

// mma.m16n8k8 in tf32; cuda/mma.cuh says who holds what.
inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = current->thread % kWarp, group = lane / 4, member = lane % 4;
  for (int k = 0; k < 8; ++k) {
    float rows[2], columns[2];
    for (int i = 0; i < 2; ++i) {
      rows[i] = tf32(shuffle(a[k / 4 * 2 + i], group * 4 + k % 4, kWarp, __LINE__));
      columns[i] = tf32(shuffle(k < 4 ? b0 : b1, (2 * member + i) * 4 + k % 4, kWarp, __LINE__));
    }
    for (int i = 0; i < 4; ++i) d[i] += rows[i / 2] * columns[i % 2];
  }
}

inline float to_float(__half value) { return __half2float(value); }
inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// mma.m16n8k16 of 16-bit types.
template <class T>
void multiply_add_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = current->thread % kWarp, group = lane / 4, member = lane % 4;
  auto half_of = [](uint32_t two, int which) {
    const uint16_t bits = static_cast<uint16_t>(two >> (16 * which));
    T value;
    std::memcpy(&value, &bits, sizeof(value));
    return to_float(value);
  };
  for (int k = 0; k < 16; ++k) {
    const int holder = k % 8 / 2;
    float rows[2], columns[2];
    for (int i = 0; i < 2; ++i) {
      rows[i] = half_of(shuffle(a[k / 8 * 2 + i], group * 4 + holder, kWarp, __LINE__), k % 2);
      columns[i] = half_of(shuffle(k < 8 ? b0 : b1, (2 * member + i) * 4 + holder, kWarp, __LINE__), k % 2);
    }
    for (int i = 0; i < 4; ++i) d[i] += rows[i / 2] * columns[i % 2];
  }
}

}  // namespace emulation
