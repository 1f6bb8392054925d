// Variants of the row gather, to choose its shape by: nvcc -O3 -std=c++17 -arch=sm_90 gather_sweep.cu
//
// Each variant copies random rows of 4,096 bf16; a graph of 8 launches on different rows and buffers is replayed, and
// the median time of a launch is printed. Every result is compared with the rows.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "../microspec_cuda/gather_rows.cuh"

#define CHECK(call)                                                                       \
  do {                                                                                    \
    const cudaError_t error = (call);                                                     \
    if (error != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));                 \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (0)

constexpr int ROWS = 128256, SLOTS = 3072, SETS = 8, UNITS = 512;  // 512 units of 16 bytes: 4,096 bf16

struct Set {
  uint4* out;
  int64_t *rows, *slots;
  int* count;
  std::vector<int64_t> host_rows, host_slots;
};

// Vector loads: `height` entries a block, IN_FLIGHT loads of a thread before its first store.
template <int THREADS, int IN_FLIGHT>
__global__ void __launch_bounds__(THREADS) vectors(uint4* out, const uint4* weight, const int64_t* rows,
                                                   const int64_t* slots, const int* count, int num_entries) {
  const int entry = blockIdx.x * blockDim.y + threadIdx.y;
  if (entry >= num_entries) return;
  const int limit = *count;
  const int64_t row = rows[entry], slot = slots[entry];
  if (entry >= limit) return;
  for (int first = blockIdx.y * blockDim.x * IN_FLIGHT + threadIdx.x; first < UNITS;
       first += gridDim.y * blockDim.x * IN_FLIGHT) {
    uint4 values[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) values[i] = microspec::load_once(weight + row * UNITS + first + i * blockDim.x, microspec::evict_first());
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) out[slot * UNITS + first + i * blockDim.x] = values[i];
  }
}

// The copy engine: one thread moves whole rows through STAGES buffers in shared memory.
template <int STAGES, int PARTS>
__global__ void __launch_bounds__(32) bulk(uint4* out, const uint4* weight, const int64_t* rows, const int64_t* slots,
                                           const int* count) {
#if __CUDA_ARCH__ >= 900
  constexpr int BYTES = UNITS * 16 / PARTS;
  extern __shared__ __align__(128) unsigned char buffers[];
  __shared__ __align__(8) uint64_t barriers[STAGES];
  if (threadIdx.x != 0) return;
  const auto shared = [](const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); };
  for (int s = 0; s < STAGES; ++s) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared(&barriers[s])));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  const int total = *count * PARTS;
  const auto load = [&](int item, int stage) {
    const unsigned barrier = shared(&barriers[stage]);
    const void* source = reinterpret_cast<const char*>(weight + rows[item / PARTS] * UNITS) + item % PARTS * BYTES;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(BYTES) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared(buffers + stage * BYTES)),
                 "l"(source), "r"(BYTES), "r"(barrier)
                 : "memory");
  };
  const int step = gridDim.x;
  int ahead = blockIdx.x, stage_ahead = 0;
  for (; stage_ahead < STAGES - 1 && ahead < total; ++stage_ahead, ahead += step) load(ahead, stage_ahead);
  int stage = 0, phase = 0;
  stage_ahead = STAGES - 1;
  for (int item = blockIdx.x; item < total; item += step) {
    unsigned done = 0;
    while (!done) {
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(shared(&barriers[stage])), "r"(phase)
          : "memory");
    }
    void* target = reinterpret_cast<char*>(out + slots[item / PARTS] * UNITS) + item % PARTS * BYTES;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
                 "r"(shared(buffers + stage * BYTES)), "r"(BYTES)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (ahead < total) {
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");  // the stage before this one is free again
      load(ahead, stage_ahead);
      ahead += step;
    }
    stage_ahead = stage;
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

using Launch = std::function<void(const Set&, int entries, cudaStream_t)>;

int main() {
  uint4* weight;
  CHECK(cudaMalloc(&weight, size_t{ROWS} * UNITS * 16));
  {
    std::mt19937 random(0);
    std::vector<uint32_t> row(UNITS * 4);
    for (int r = 0; r < ROWS; ++r) {
      const uint32_t seed = random();
      for (size_t i = 0; i < row.size(); ++i) row[i] = seed + static_cast<uint32_t>(i) * 2654435761u;
      CHECK(cudaMemcpyAsync(weight + size_t{UNITS} * r, row.data(), UNITS * 16, cudaMemcpyHostToDevice));
    }
  }
  std::vector<Set> sets(SETS);
  for (int i = 0; i < SETS; ++i) {
    Set& set = sets[i];
    std::mt19937 random(i + 1);
    std::vector<int64_t> all(ROWS);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random);
    set.host_rows.assign(all.begin(), all.begin() + SLOTS);
    set.host_slots.resize(SLOTS);
    std::iota(set.host_slots.begin(), set.host_slots.end(), 0);
    std::shuffle(set.host_slots.begin(), set.host_slots.end(), random);
    CHECK(cudaMalloc(&set.out, size_t{SLOTS} * UNITS * 16));
    CHECK(cudaMalloc(&set.rows, SLOTS * 8));
    CHECK(cudaMalloc(&set.slots, SLOTS * 8));
    CHECK(cudaMalloc(&set.count, 4));
    CHECK(cudaMemcpy(set.rows, set.host_rows.data(), SLOTS * 8, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(set.slots, set.host_slots.data(), SLOTS * 8, cudaMemcpyHostToDevice));
  }
  int multiprocessors = 0;
  CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));

  std::vector<std::pair<std::string, Launch>> variants;
#define VECTORS(THREADS, WIDTH, IN_FLIGHT)                                                                       \
  variants.emplace_back("vectors " #THREADS " threads, " #WIDTH " wide, " #IN_FLIGHT " in flight",               \
                        [=](const Set& s, int entries, cudaStream_t stream) {                                    \
                          const int height = THREADS / WIDTH;                                                    \
                          vectors<THREADS, IN_FLIGHT>                                                            \
                              <<<dim3((entries + height - 1) / height, UNITS / (WIDTH * IN_FLIGHT)),             \
                                 dim3(WIDTH, height), 0, stream>>>(s.out, weight, s.rows, s.slots, s.count, entries); \
                        })
  VECTORS(128, 128, 4);
  VECTORS(128, 128, 2);
  VECTORS(128, 64, 8);
  VECTORS(256, 256, 2);
  VECTORS(256, 128, 4);
  VECTORS(256, 64, 8);
  VECTORS(512, 128, 4);
  VECTORS(512, 256, 2);
  VECTORS(64, 64, 8);
  VECTORS(64, 64, 4);
  VECTORS(1024, 128, 4);
#define BULK(STAGES, PARTS, BLOCKS)                                                                               \
  variants.emplace_back("bulk " #STAGES " stages, row in " #PARTS ", " #BLOCKS " blocks an SM",                   \
                        [=](const Set& s, int entries, cudaStream_t stream) {                                     \
                          const int bytes = STAGES * UNITS * 16 / PARTS;                                          \
                          CHECK(cudaFuncSetAttribute(bulk<STAGES, PARTS>,                                         \
                                                     cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));        \
                          const int blocks = std::min(entries * PARTS, multiprocessors * BLOCKS);                 \
                          bulk<STAGES, PARTS><<<blocks, 32, bytes, stream>>>(s.out, weight, s.rows, s.slots, s.count); \
                        })
  BULK(4, 1, 4);
  BULK(8, 1, 2);
  BULK(3, 1, 8);
  BULK(8, 2, 4);
  BULK(4, 2, 8);
  BULK(4, 4, 16);

  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  for (const auto& [count, entries] : {std::pair{3072, 3072}, std::pair{200, 240}}) {
    for (Set& set : sets) CHECK(cudaMemcpy(set.count, &count, 4, cudaMemcpyHostToDevice));
    std::printf("%d of %d rows\n", count, entries);
    for (const auto& [name, launch] : variants) {
      for (const Set& set : sets) CHECK(cudaMemset(set.out, 0x5A, size_t{SLOTS} * UNITS * 16));
      cudaGraph_t graph;
      cudaGraphExec_t executable;
      CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (const Set& set : sets) launch(set, entries, stream);
      CHECK(cudaGetLastError());
      CHECK(cudaStreamEndCapture(stream, &graph));
      CHECK(cudaGraphInstantiate(&executable, graph, 0));
      cudaEvent_t start, end;
      CHECK(cudaEventCreate(&start));
      CHECK(cudaEventCreate(&end));
      std::vector<float> times;
      for (int i = 0; i < 45; ++i) {
        CHECK(cudaEventRecord(start, stream));
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        float milliseconds = 0;
        CHECK(cudaEventElapsedTime(&milliseconds, start, end));
        if (i >= 5) times.push_back(milliseconds);
      }
      std::sort(times.begin(), times.end());
      const double us = 1000.0 * times[times.size() / 2] / SETS;
      // Every row of the last set, and a slot that must have stayed as it was.
      const Set& set = sets.back();
      std::vector<uint4> got(UNITS), wanted(UNITS);
      bool is_right = true;
      for (int i = 0; i < count; i += 7) {
        CHECK(cudaMemcpy(got.data(), set.out + set.host_slots[i] * UNITS, UNITS * 16, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(wanted.data(), weight + set.host_rows[i] * UNITS, UNITS * 16, cudaMemcpyDeviceToHost));
        is_right = is_right && std::equal(reinterpret_cast<char*>(got.data()),
                                          reinterpret_cast<char*>(got.data() + UNITS),
                                          reinterpret_cast<char*>(wanted.data()));
      }
      std::printf("  %-48s %7.2f us  %5.2f TB/s  %s\n", name.c_str(), us, 2.0 * count * UNITS * 16 / us / 1e6,
                  is_right ? "right" : "WRONG");
      CHECK(cudaGraphExecDestroy(executable));
      CHECK(cudaGraphDestroy(graph));
    }
  }
}
