// What CUDA adds to C++, for running a kernel on a CPU: one std::thread per thread of a block, block after block.
#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static

struct Dim3 { unsigned x, y, z; };
struct int4 { int x, y, z, w; };
struct longlong2 { long long x, y; };
static thread_local Dim3 threadIdx, blockIdx;
static Dim3 blockDim, gridDim;
static std::unique_ptr<std::barrier<>> block_barrier;

static void __syncthreads() { block_barrier->arrive_and_wait(); }
static void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
typedef unsigned long long word;
static word atomicAdd(word* at, word value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
static word atomicOr(word* at, word value) { return __atomic_fetch_or(at, value, __ATOMIC_RELAXED); }
static word atomicExch(word* at, word value) { return __atomic_exchange_n(at, value, __ATOMIC_RELAXED); }
static word atomicMax(word* at, word value) {
  word found = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (found < value && !__atomic_compare_exchange_n(at, &found, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  return found;
}

// All threads of a block take the same early exits in our kernels, so they meet again at the end of the block.
template <typename Kernel>
static void run_grid(Dim3 grid, unsigned threads, Kernel kernel) {
  gridDim = grid;
  blockDim = {threads, 1, 1};
  const auto run_thread = [&](unsigned thread) {
    for (unsigned z = 0; z < grid.z; z++)
      for (unsigned y = 0; y < grid.y; y++)
        for (unsigned x = 0; x < grid.x; x++) {
          threadIdx = {thread, 0, 0};
          blockIdx = {x, y, z};
          kernel();
          __syncthreads();
        }
  };
  block_barrier = std::make_unique<std::barrier<>>(threads);
  std::vector<std::thread> team;
  for (unsigned thread = 1; thread < threads; thread++) team.emplace_back(run_thread, thread);
  run_thread(0);
  for (auto& member : team) member.join();
}
