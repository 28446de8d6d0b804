/* The plain-C interface between a plugin's shared library and its Python (or any other) caller.
 *
 * Two structs cross it: int8moe_layer is filled once per layer, int8moe_call or int8moe_rows_call once per
 * call. Both begin with their own size and with INT8MOE_DRIVER_VERSION, so that a library and a caller of
 * different versions refuse each other instead of reading each other's memory wrongly.
 * Every stride counts elements; every offset is 64-bit. Nothing that is passed in is written, except `out`.
 */
#ifndef INT8MOE_ABI_H
#define INT8MOE_ABI_H

#include <stdint.h>

/* Raised whenever a struct or function below, or the meaning of a packed byte, changes. */
#define INT8MOE_DRIVER_VERSION 2
/* The version of docs/numerics.md that the driver computes. */
#define INT8MOE_NUMERICS_VERSION 1
/* 65,793 * 127 * 257 < 2^31: no int32 sum overflows up to this depth, offset weights included. */
#define INT8MOE_MAX_REDUCTION 65793

#if defined(_WIN32)
#define INT8MOE_EXPORT __declspec(dllexport)
#else
#define INT8MOE_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum int8moe_dtype {
  INT8MOE_F32 = 0,
  INT8MOE_BF16 = 1,
  INT8MOE_F16 = 2,
  INT8MOE_I8 = 3,
  INT8MOE_I32 = 4,
  INT8MOE_I64 = 5
};

/* In the order of int8moe.contracts.ACTIVATIONS. */
enum int8moe_activation {
  INT8MOE_SILU = 0,
  INT8MOE_GELU = 1,
  INT8MOE_GELU_TANH = 2,
  INT8MOE_SWIGLUOAI = 3,
  INT8MOE_SILU_NO_MUL = 4,
  INT8MOE_GELU_NO_MUL = 5,
  INT8MOE_GELU_TANH_NO_MUL = 6,
  INT8MOE_RELU2_NO_MUL = 7,
  INT8MOE_ACTIVATION_COUNT = 8
};

enum int8moe_status {
  INT8MOE_OK = 0,
  INT8MOE_ERROR_VERSION = 1,
  INT8MOE_ERROR_TIER = 2,
  INT8MOE_ERROR_ARGUMENT = 3,
  INT8MOE_ERROR_MEMORY = 4
};

/* One layer of packed experts. Bias and expert_map pointers may be null. */
typedef struct int8moe_layer {
  uint32_t struct_bytes;
  uint32_t driver_version;
  int32_t tier;       /* index into the library's tier table */
  int32_t activation; /* enum int8moe_activation */
  int64_t num_experts;
  int64_t local_experts;
  int64_t hidden_size;
  int64_t intermediate_size;
  const uint8_t* w13; /* packed experts, w13_stride bytes apart */
  int64_t w13_stride;
  const uint8_t* w2;
  int64_t w2_stride;
  const float* w13_scale; /* [local_experts, 2I or I], contiguous */
  const float* w2_scale;  /* [local_experts, H], contiguous */
  const float* w13_bias;
  const float* w2_bias;
  const int32_t* expert_map; /* [num_experts] global to local id, or null */
  float swiglu_alpha;
  float swiglu_limit;
  int32_t router_weight_on_input;
  int32_t reserved;
} int8moe_layer;

/* One forward of M tokens. `out` is [tokens, H], contiguous, in x_dtype. */
typedef struct int8moe_call {
  uint32_t struct_bytes;
  int32_t workers; /* upper bound; torch's own thread count bounds it further */
  int64_t tokens;
  int64_t top_k;
  const void* x;
  int64_t x_row_stride;
  int64_t x_column_stride;
  const void* weights;
  int64_t weights_row_stride;
  int64_t weights_column_stride;
  const void* ids;
  int64_t ids_row_stride;
  int64_t ids_column_stride;
  void* out;
  int32_t x_dtype;       /* F32 | BF16 | F16 */
  int32_t weights_dtype; /* F32 | BF16 | F16 */
  int32_t ids_dtype;     /* I32 | I64 */
  int32_t reserved;
} int8moe_call;

/* Rows sorted by local expert: out[rows, H] fp32 is the un-weighted y of step 7. */
typedef struct int8moe_rows_call {
  uint32_t struct_bytes;
  int32_t workers;
  int64_t rows;
  const void* x;
  int64_t x_row_stride;
  int64_t x_column_stride;
  const float* row_scales; /* with int8 rows only */
  int64_t row_scales_stride;
  const void* counts; /* [local_experts] I32 | I64 */
  int64_t counts_stride;
  float* out;
  int32_t x_dtype; /* F32 | BF16 | F16 | I8 */
  int32_t counts_dtype;
} int8moe_rows_call;

/* One matrix of every expert, in the storage of a layer: canonical rows in, panels out, and back. */
typedef struct int8moe_pack_call {
  uint32_t struct_bytes;
  int32_t workers;
  uint8_t* storage; /* expert e starts at storage + e * expert_stride */
  int64_t expert_stride;
  int64_t experts;
  int64_t halves; /* 2 for a gated w13, else 1 */
  int64_t rows;   /* output channels of one half */
  int64_t depth;  /* reduction length */
} int8moe_pack_call;

/* torch's C symbols (libtorch_cpu, torch >= 2.10). */
typedef int32_t (*int8moe_parallel_for)(int64_t begin, int64_t end, int64_t grain,
                                        void (*function)(int64_t, int64_t, void*), void* context);
typedef int32_t (*int8moe_get_num_threads)(uint32_t* count);

/* What every plugin library exports (defined by library.h). */
INT8MOE_EXPORT int32_t int8moe_driver_version(void);
INT8MOE_EXPORT int32_t int8moe_numerics_version(void);
INT8MOE_EXPORT int32_t int8moe_tier_count(void);
INT8MOE_EXPORT const char* int8moe_tier_name(int32_t tier);
INT8MOE_EXPORT const char* int8moe_status_text(int32_t status);
/* Hands in torch's threads; null pointers mean serial. */
INT8MOE_EXPORT void int8moe_set_parallel(int8moe_parallel_for run, int8moe_get_num_threads count);
/* For the child of a fork: serial from here on, locks of vanished threads are forgotten. */
INT8MOE_EXPORT void int8moe_after_fork(void);
/* 0 = the larger of 256 MiB and 64 MiB per worker. */
INT8MOE_EXPORT void int8moe_set_scratch_limit(int64_t bytes);
INT8MOE_EXPORT int64_t int8moe_scratch_bytes(void);
INT8MOE_EXPORT void int8moe_release_scratch(void);
/* Packed bytes of one expert's matrix, or -1 for an impossible shape. */
INT8MOE_EXPORT int64_t int8moe_packed_bytes(int64_t halves, int64_t rows, int64_t depth);
INT8MOE_EXPORT int32_t int8moe_pack(const int8moe_pack_call* call);
INT8MOE_EXPORT int32_t int8moe_unpack(const int8moe_pack_call* call);
INT8MOE_EXPORT int32_t int8moe_forward(const int8moe_layer* layer, const int8moe_call* call);
INT8MOE_EXPORT int32_t int8moe_forward_rows(const int8moe_layer* layer, const int8moe_rows_call* call);
/* For benchmarks. Multiply-adds that all workers did, each `iterations` times round the tier's fastest loop; -1 for an
 * unknown tier. */
INT8MOE_EXPORT int64_t int8moe_run_peak(int32_t tier, int32_t workers, int64_t iterations);
/* Reads every byte once, each worker a contiguous share; returns a value made of them all. */
INT8MOE_EXPORT int32_t int8moe_read_memory(int32_t tier, int32_t workers, const void* memory, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
