// The exported functions of a plugin's library, included once, by its dispatcher (compiled for the baseline).
//
// The dispatcher defines, before including:
//   extern "C" const int8moe_tier* const int8moe_tiers[] = {&int8moe_tier_a, ...};
//   extern "C" const int32_t int8moe_tiers_count = ...;
//   #define INT8MOE_LAYOUT the PanelLayout that its tiers share
// Choosing a tier is the caller's business: nothing here runs one that was not asked for.
#ifndef INT8MOE_LIBRARY_H
#define INT8MOE_LIBRARY_H

#include "abi.h"
#include "panels.h"
#include "parallel.h"
#include "runtime.h"
#include "scratch.h"

namespace int8moe {
namespace {

Scratch scratch;
int64_t scratch_limit = 0;
int8moe_parallel_for parallel_for = nullptr;
int8moe_get_num_threads get_num_threads = nullptr;

void* acquire_scratch(int64_t bytes) { return scratch.acquire(bytes); }
void release_scratch(void* block) {
  scratch.release(block, scratch_limit > 0 ? scratch_limit : 256 * kMiB);
}

int8moe_runtime current_runtime() {
  return {__atomic_load_n(&parallel_for, __ATOMIC_ACQUIRE), get_num_threads, scratch_limit, acquire_scratch,
          release_scratch};
}

const int8moe_tier* tier_of(int32_t tier) {
  return tier >= 0 && tier < int8moe_tiers_count ? int8moe_tiers[tier] : nullptr;
}

struct PackJob {
  const int8moe_pack_call* call;
  ExpertPacker<INT8MOE_LAYOUT> packer;
  uint8_t* temporary;  // one piece per worker
  int64_t temporary_bytes;
  bool unpack;
};

void pack_expert(void* context, int64_t expert, int64_t, int worker) {
  const PackJob& job = *static_cast<const PackJob*>(context);
  uint8_t* storage = job.call->storage + expert * job.call->expert_stride;
  uint8_t* temporary = job.temporary + worker * job.temporary_bytes;
  if (job.unpack)
    job.packer.unpack(storage, temporary);
  else
    job.packer.pack(storage, temporary);
}

int32_t run_pack(const int8moe_pack_call* call, bool unpack) {
  if (call->struct_bytes != sizeof *call) return INT8MOE_ERROR_VERSION;
  if (call->experts < 0 || call->halves < 1 || call->rows < 1 || call->depth < 1) return INT8MOE_ERROR_ARGUMENT;
  PackJob job = {call, {call->halves, call->rows, call->depth}, nullptr, 0, unpack};
  const int64_t needed = job.packer.packed_bytes() > job.packer.canonical_bytes() ? job.packer.packed_bytes()
                                                                                : job.packer.canonical_bytes();
  if (call->expert_stride < needed) return INT8MOE_ERROR_ARGUMENT;
  const int8moe_runtime runtime = current_runtime();
  // Whole experts in temporaries: one at a time, so that the extra peak is one expert.
  const int workers = job.packer.in_place() ? worker_count(&runtime, call->workers) : 1;
  job.temporary_bytes = round_up(job.packer.temporary_bytes(), 64);
  job.temporary = static_cast<uint8_t*>(malloc(static_cast<size_t>(job.temporary_bytes * workers)));
  if (job.temporary == nullptr) return INT8MOE_ERROR_MEMORY;
  run_region(&runtime, workers, call->experts, pack_expert, &job);
  free(job.temporary);
  return INT8MOE_OK;
}

}  // namespace
}  // namespace int8moe

extern "C" {

int32_t int8moe_driver_version(void) { return INT8MOE_DRIVER_VERSION; }
int32_t int8moe_numerics_version(void) { return INT8MOE_NUMERICS_VERSION; }
int32_t int8moe_tier_count(void) { return int8moe_tiers_count; }

const char* int8moe_tier_name(int32_t tier) {
  const int8moe_tier* found = int8moe::tier_of(tier);
  return found == nullptr ? nullptr : found->name;
}

const char* int8moe_status_text(int32_t status) {
  switch (status) {
    case INT8MOE_OK: return "ok";
    case INT8MOE_ERROR_VERSION: return "the library and its caller are of different driver versions";
    case INT8MOE_ERROR_TIER: return "the library has no such tier";
    case INT8MOE_ERROR_ARGUMENT: return "an argument is out of range";
    case INT8MOE_ERROR_MEMORY: return "out of memory for scratch";
    default: return "unknown status";
  }
}

void int8moe_set_parallel(int8moe_parallel_for run, int8moe_get_num_threads count) {
  int8moe::get_num_threads = count;
  __atomic_store_n(&int8moe::parallel_for, run, __ATOMIC_RELEASE);
}

void int8moe_after_fork(void) {
  int8moe_set_parallel(nullptr, nullptr);
  int8moe::scratch.forget();
}

void int8moe_set_scratch_limit(int64_t bytes) { int8moe::scratch_limit = bytes; }
int64_t int8moe_scratch_bytes(void) { return int8moe::scratch.bytes(); }
void int8moe_release_scratch(void) { int8moe::scratch.clear(); }

int64_t int8moe_packed_bytes(int64_t halves, int64_t rows, int64_t depth) {
  if (halves < 1 || rows < 1 || depth < 1) return -1;
  return int8moe::ExpertPacker<INT8MOE_LAYOUT>{halves, rows, depth}.packed_bytes();
}

int32_t int8moe_pack(const int8moe_pack_call* call) { return int8moe::run_pack(call, false); }
int32_t int8moe_unpack(const int8moe_pack_call* call) { return int8moe::run_pack(call, true); }

int32_t int8moe_forward(const int8moe_layer* layer, const int8moe_call* call) {
  const int8moe_tier* tier = int8moe::tier_of(layer->tier);
  if (tier == nullptr) return INT8MOE_ERROR_TIER;
  const int8moe_runtime runtime = int8moe::current_runtime();
  return tier->forward(&runtime, layer, call);
}

int32_t int8moe_forward_rows(const int8moe_layer* layer, const int8moe_rows_call* call) {
  const int8moe_tier* tier = int8moe::tier_of(layer->tier);
  if (tier == nullptr) return INT8MOE_ERROR_TIER;
  const int8moe_runtime runtime = int8moe::current_runtime();
  return tier->forward_rows(&runtime, layer, call);
}

int64_t int8moe_run_peak(int32_t tier, int32_t workers, int64_t iterations) {
  const int8moe_tier* found = int8moe::tier_of(tier);
  const int8moe_runtime runtime = int8moe::current_runtime();
  return found == nullptr ? -1 : found->run_peak(&runtime, workers, iterations);
}

int32_t int8moe_read_memory(int32_t tier, int32_t workers, const void* memory, int64_t bytes) {
  const int8moe_tier* found = int8moe::tier_of(tier);
  const int8moe_runtime runtime = int8moe::current_runtime();
  return found == nullptr ? 0 : found->read_memory(&runtime, workers, memory, bytes);
}

}  // extern "C"

#endif
