// One parallel region per phase, over torch's own threads.
//
// A region is `workers` chunks handed to torch_parallel_for, which promises no concurrency: it may run them one
// after another. So no worker ever waits for another. Each takes the next task from a shared counter until none
// is left, and the region ends when torch_parallel_for returns. Serial where no parallel_for is given.
#ifndef INT8MOE_PARALLEL_H
#define INT8MOE_PARALLEL_H

#include "fp_control.h"
#include "runtime.h"
#include "vectors.h"

namespace int8moe {
namespace {

// `worker` is in [0, workers): no two tasks that run at the same time have the same. `next` is the task that this worker
// does afterwards, where it has one and kAhead is given; else it is `task` itself.
typedef void (*TaskFunction)(void* context, int64_t task, int64_t next, int worker);

// kAhead: a worker takes its next task before it does one, so that the one knows what to fetch for the other. The price
// is a task that waits for a busy worker while another has none: for regions of many small tasks.
enum Taking { kOneByOne, kAhead };

struct Region {
  TaskFunction function;
  void* context;
  int64_t tasks;
  int64_t next;  // touched with __atomic_* only
  Taking taking;

  int64_t take() { return __atomic_fetch_add(&next, int64_t{1}, __ATOMIC_RELAXED); }
};

inline INT8MOE_NOINLINE void run_tasks(int64_t begin, int64_t, void* opaque) {
  Region* region = static_cast<Region*>(opaque);
  const IeeeGuard guard;
  int64_t task = region->take();
  while (task < region->tasks) {
    int64_t next = region->taking == kAhead ? region->take() : region->tasks;
    region->function(region->context, task, next < region->tasks ? next : task, static_cast<int>(begin));
    task = region->taking == kAhead ? next : region->take();
  }
}

inline int worker_count(const int8moe_runtime* runtime, int32_t bound) {
  if (runtime->parallel_for == nullptr || bound <= 1) return 1;
  uint32_t available = 1;
  if (runtime->get_num_threads != nullptr && runtime->get_num_threads(&available) != 0) available = 1;
  if (runtime->get_num_threads == nullptr) available = static_cast<uint32_t>(bound);
  const int64_t workers = available < static_cast<uint32_t>(bound) ? available : static_cast<uint32_t>(bound);
  return workers < 1 ? 1 : static_cast<int>(workers);
}

inline void run_region(const int8moe_runtime* runtime, int workers, int64_t tasks, TaskFunction function,
                       void* context, Taking taking = kOneByOne) {
  if (tasks <= 0) return;
  Region region = {function, context, tasks, 0, taking};
  const int64_t chunks = tasks < workers ? tasks : workers;
  if (chunks > 1 && runtime->parallel_for != nullptr &&
      runtime->parallel_for(0, chunks, 1, run_tasks, &region) == 0)
    return;
  run_tasks(0, 1, &region);
}

}  // namespace
}  // namespace int8moe
#endif
