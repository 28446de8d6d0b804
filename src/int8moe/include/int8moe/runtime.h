// What the dispatcher of a library hands to its tiers: threads, scratch memory, and the table of tiers.
// Plain C, so that units built with different instruction sets can share it.
#ifndef INT8MOE_RUNTIME_H
#define INT8MOE_RUNTIME_H

#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct int8moe_runtime {
  int8moe_parallel_for parallel_for; /* null = serial */
  int8moe_get_num_threads get_num_threads;
  int64_t scratch_limit; /* 0 = by default rule */
  void* (*acquire)(int64_t bytes);
  void (*release)(void* block);
} int8moe_runtime;

typedef struct int8moe_tier {
  const char* name;
  int32_t (*forward)(const int8moe_runtime*, const int8moe_layer*, const int8moe_call*);
  int32_t (*forward_rows)(const int8moe_runtime*, const int8moe_layer*, const int8moe_rows_call*);
  int64_t (*run_peak)(const int8moe_runtime*, int32_t workers, int64_t iterations);
  int32_t (*read_memory)(const int8moe_runtime*, int32_t workers, const void* memory, int64_t bytes);
} int8moe_tier;

#ifdef __cplusplus
}
#endif
#endif
