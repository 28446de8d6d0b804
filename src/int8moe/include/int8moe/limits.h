// What a machine can do at most: the two limits of a roofline, over the same threads as a forward.
//
//   peak of a tier   Kernel::peak on every worker: its best multiply-add, fed from registers or L1
//   read bandwidth   every worker reads its share of a buffer once, in order, with the tier's vectors
//
// The larger of (bytes of weights / bandwidth) and (multiply-adds / peak) is the least time that a call can take.
#ifndef INT8MOE_LIMITS_H
#define INT8MOE_LIMITS_H

#include "parallel.h"
#include "runtime.h"
#include "vectors.h"

namespace int8moe {
namespace {

template <class Kernel>
struct Limits {
  static int64_t run_peak(const int8moe_runtime* runtime, int32_t bound, int64_t iterations) {
    Peak job = {iterations, 0};
    const int workers = worker_count(runtime, bound);
    run_region(runtime, workers, workers, peak_task, &job);
    return job.products;
  }

  // Returns the exclusive or of what was read, so that no load can be left out.
  static int32_t read_memory(const int8moe_runtime* runtime, int32_t bound, const void* memory, int64_t bytes) {
    const int workers = worker_count(runtime, bound);
    const int64_t lines = bytes / kBlockBytes;
    Read job = {static_cast<const uint8_t*>(memory), lines, (lines + workers - 1) / workers, 0};
    run_region(runtime, workers, workers, read_task, &job);
    for (int64_t i = lines * kBlockBytes; i < bytes; ++i) job.mixed ^= job.memory[i];
    return job.mixed;
  }

 private:
  static constexpr int kStreams = 8;
  static constexpr int64_t kBlockBytes = kStreams * static_cast<int64_t>(sizeof(I32));

  struct Peak {
    int64_t iterations;
    int64_t products;  // touched with __atomic_* only while workers run
  };
  struct Read {
    const uint8_t* memory;
    int64_t blocks, share;
    int32_t mixed;  // likewise
  };

  static INT8MOE_NOINLINE void peak_task(void* context, int64_t, int64_t, int) {
    Peak* job = static_cast<Peak*>(context);
    __atomic_fetch_add(&job->products, Kernel::peak(job->iterations), __ATOMIC_RELAXED);
  }

  static INT8MOE_NOINLINE void read_task(void* context, int64_t task, int64_t, int) {
    Read* job = static_cast<Read*>(context);
    const int64_t first = task * job->share, stop = first + job->share;
    const int64_t last = stop < job->blocks ? stop : job->blocks;
    I32 mixed[kStreams] = {};
    for (int64_t block = first; block < last; ++block) {
      const uint8_t* const at = job->memory + block * kBlockBytes;
#pragma GCC unroll 8
      for (int i = 0; i < kStreams; ++i) mixed[i] ^= load<I32>(at + i * static_cast<int64_t>(sizeof(I32)));
    }
    for (int i = 1; i < kStreams; ++i) mixed[0] ^= mixed[i];
    int32_t folded = 0;
    for (int lane = 0; lane < kLanes; ++lane) folded ^= mixed[0][lane];
    __atomic_fetch_xor(&job->mixed, folded, __ATOMIC_RELAXED);
  }
};

}  // namespace
}  // namespace int8moe
#endif
