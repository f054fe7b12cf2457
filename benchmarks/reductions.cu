// How fast one GPU reads, writes and adds to random rows of 128 bytes: the ceilings in docs/maxk.md.
//
//   nvcc -std=c++17 -O3 -arch=sm_90 -o reductions benchmarks/reductions.cu && ./reductions
//
// 20 million rows of tables of three sizes; best of five runs, in GB/s of rows. red4: atomicAdd of eight lanes a row;
// red4 by warp: of 32 lanes; red8, red16: vector reductions of eight lanes; bulk: cp.reduce.async.bulk from shared
// memory.
#include <cuda_runtime.h>

#include <cstdio>
#include <random>
#include <vector>

enum Mode { red4, red16, red8, load, store };

template <Mode MODE>
__global__ void by_eight(const int* rows, float* table, size_t count) {
  const size_t thread = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t workers = static_cast<size_t>(gridDim.x) * blockDim.x / 8;
  const int lane = thread % 8;
  float sum = 0;
  for (size_t i = thread / 8; i < count; i += workers) {
    float* row = table + static_cast<size_t>(rows[i]) * 32;
    if (MODE == red4)
      for (int j = 0; j < 4; ++j) atomicAdd(row + lane + 8 * j, 1.f);
    if (MODE == red16)
      asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(row + 4 * lane), "f"(1.f) : "memory");
    if (MODE == red8)
      for (int j = 0; j < 2; ++j)
        asm volatile("red.global.add.v2.f32 [%0], {%1, %1};" ::"l"(row + 16 * j + 2 * lane), "f"(1.f) : "memory");
    if (MODE == load) {
      const float4 four = *reinterpret_cast<float4*>(row + 4 * lane);
      sum += four.x + four.y + four.z + four.w;
    }
    if (MODE == store) *reinterpret_cast<float4*>(row + 4 * lane) = make_float4(1, 1, 1, 1);
  }
  if (MODE == load && sum == 12345.f) table[0] = sum;  // so that the loads are not left out
}

__global__ void by_warp(const int* rows, float* table, size_t count) {
  const size_t thread = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (size_t i = thread / 32; i < count; i += static_cast<size_t>(gridDim.x) * blockDim.x / 32)
    atomicAdd(table + static_cast<size_t>(rows[i]) * 32 + thread % 32, 1.f);
}

__global__ void bulk(const int* rows, float* table, size_t count) {
  __shared__ alignas(128) float values[256 * 32 / 8];
  for (int i = threadIdx.x; i < 256 * 32 / 8; i += blockDim.x) values[i] = 1.f;
  __syncthreads();
  asm volatile("fence.proxy.async.shared::cta;");
  const auto from = static_cast<unsigned>(__cvta_generic_to_shared(values + threadIdx.x / 8 * 32));
  const size_t thread = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (size_t i = thread; i < count; i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    float* row = table + static_cast<size_t>(rows[i]) * 32;
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 128;" ::"l"(row), "r"(from)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;");
    asm volatile("cp.async.bulk.wait_group.read 8;");
  }
  asm volatile("cp.async.bulk.wait_group 0;");
}

int main() {
  const size_t count = 20000000;
  const int blocks = 132 * 8, threads = 256;
  std::printf("table_rows,what,ms,gb_per_s\n");
  for (const size_t size : {132534ul, 232965ul, 2449029ul}) {
    std::vector<int> picks(count);
    std::mt19937_64 random(1);
    for (int& pick : picks) pick = static_cast<int>(random() % size);
    int* rows;
    float* table;
    cudaMalloc(&rows, count * 4);
    cudaMalloc(&table, size * 128);
    cudaMemcpy(rows, picks.data(), count * 4, cudaMemcpyHostToDevice);
    cudaMemset(table, 0, size * 128);
    const auto measure = [&](const char* what, auto kernel) {
      cudaEvent_t begin, end;
      cudaEventCreate(&begin);
      cudaEventCreate(&end);
      float best = 1e9f;
      for (int i = 0; i < 5; ++i) {
        float ms;
        cudaEventRecord(begin);
        kernel<<<blocks, threads>>>(rows, table, count);
        cudaEventRecord(end);
        cudaEventSynchronize(end);
        cudaEventElapsedTime(&ms, begin, end);
        best = ms < best ? ms : best;
      }
      const cudaError_t status = cudaGetLastError();
      if (status != cudaSuccess) std::printf("%s: %s\n", what, cudaGetErrorString(status));
      std::printf("%zu,%s,%.3f,%.0f\n", size, what, best, count * 128 / best / 1e6);
    };
    measure("red4", by_eight<red4>);
    measure("red4 by warp", by_warp);
    measure("red8", by_eight<red8>);
    measure("red16", by_eight<red16>);
    measure("bulk", bulk);
    measure("load", by_eight<load>);
    measure("store", by_eight<store>);
    cudaFree(rows);
    cudaFree(table);
  }
}
