// Checks that offsets into the weights are 64-bit: a layer of more than 2^32 bytes, of which a few experts are touched.
//
//   check_offsets TIER
//
// The memory is sparse: mapped without reservation, so only pages that are written exist. The first expert and some far
// ones hold the same weights, all others zeros: each token has to give the same non-zero bits whichever of them it asks
// for. An offset that was cut to 32 bits would find zeros, another expert's bytes, or no memory.
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <int8moe/abi.h>

namespace {

constexpr int64_t kExperts = 70000, kHidden = 64, kInner = 512;
// An expert of w13 is 2^16 bytes. The second of these starts at 2^31 of them, the third just behind 2^32: not at 2^32
// itself, which cut to 32 bits would be the first.
constexpr int64_t kChosen[] = {0, 32768, 65537, kExperts - 1};
constexpr int64_t kTokens = sizeof kChosen / sizeof kChosen[0];

template <class T>
T* sparse(int64_t count) {
  void* memory = mmap(nullptr, static_cast<size_t>(count) * sizeof(T), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<T*>(memory);
}

// The same numbers for every chosen expert.
bool fill(uint8_t* weights, float* scale, int64_t stride, int64_t expert, int64_t halves, int64_t rows,
          int64_t depth) {
  uint8_t* const here = weights + expert * stride;
  for (int64_t i = 0; i < stride; ++i) here[i] = static_cast<uint8_t>(i * 31 + i / 255);
  for (int64_t i = 0; i < halves * rows; ++i) scale[expert * halves * rows + i] = 1.0f / static_cast<float>(64 + i);
  const int8moe_pack_call call = {sizeof call, 1, here, stride, 1, halves, rows, depth};
  return int8moe_pack(&call) == INT8MOE_OK;
}

}  // namespace

int main(int argc, char** argv) {
  int32_t tier = -1;
  for (int32_t t = 0; argc == 2 && t < int8moe_tier_count(); ++t)
    if (strcmp(int8moe_tier_name(t), argv[1]) == 0) tier = t;
  if (tier < 0) {
    fprintf(stderr, "usage: check_offsets TIER\n");
    return 2;
  }
  int8moe_layer layer = {};
  layer.struct_bytes = sizeof layer;
  layer.driver_version = INT8MOE_DRIVER_VERSION;
  layer.tier = tier;
  layer.activation = INT8MOE_SILU;
  layer.num_experts = layer.local_experts = kExperts;
  layer.hidden_size = kHidden;
  layer.intermediate_size = kInner;
  layer.w13_stride = int8moe_packed_bytes(2, kInner, kHidden);
  layer.w2_stride = int8moe_packed_bytes(1, kHidden, kInner);
  uint8_t* const w13 = sparse<uint8_t>(kExperts * layer.w13_stride);
  uint8_t* const w2 = sparse<uint8_t>(kExperts * layer.w2_stride);
  float* const w13_scale = sparse<float>(kExperts * 2 * kInner);
  float* const w2_scale = sparse<float>(kExperts * kHidden);
  if (w13 == nullptr || w2 == nullptr || w13_scale == nullptr || w2_scale == nullptr) {
    fprintf(stderr, "check_offsets: no address space for %lld bytes\n",
            static_cast<long long>(kExperts * (layer.w13_stride + layer.w2_stride)));
    return 2;
  }
  for (const int64_t expert : kChosen)
    if (!fill(w13, w13_scale, layer.w13_stride, expert, 2, kInner, kHidden) ||
        !fill(w2, w2_scale, layer.w2_stride, expert, 1, kHidden, kInner)) {
      fprintf(stderr, "check_offsets: packing failed\n");
      return 2;
    }
  layer.w13 = w13;
  layer.w2 = w2;
  layer.w13_scale = w13_scale;
  layer.w2_scale = w2_scale;

  float x[kTokens][kHidden], out[kTokens][kHidden], weights[kTokens];
  for (int64_t token = 0; token < kTokens; ++token) {
    weights[token] = 1.0f;
    for (int64_t i = 0; i < kHidden; ++i) x[token][i] = static_cast<float>(i % 7 - 3);
  }
  memset(out, 0xCD, sizeof out);
  int8moe_call call = {};
  call.struct_bytes = sizeof call;
  call.workers = 1;
  call.tokens = kTokens;
  call.top_k = 1;
  call.x = x;
  call.x_row_stride = kHidden;
  call.x_column_stride = 1;
  call.weights = weights;
  call.weights_row_stride = 1;
  call.weights_column_stride = 1;
  call.ids = kChosen;
  call.ids_row_stride = 1;
  call.ids_column_stride = 1;
  call.out = out;
  call.x_dtype = call.weights_dtype = INT8MOE_F32;
  call.ids_dtype = INT8MOE_I64;
  const int32_t status = int8moe_forward(&layer, &call);
  if (status != INT8MOE_OK) {
    fprintf(stderr, "check_offsets: %s\n", int8moe_status_text(status));
    return 2;
  }
  int different = 0, zeros = 0;
  for (int64_t i = 0; i < kHidden; ++i) zeros += out[0][i] == 0.0f;
  for (int64_t token = 1; token < kTokens; ++token) different += memcmp(out[token], out[0], sizeof out[0]) != 0;
  printf("%s: w13 of %lld bytes, %d of %lld far experts differ, %d zeros\n", argv[1],
         static_cast<long long>(kExperts * layer.w13_stride), different, static_cast<long long>(kTokens - 1), zeros);
  return different == 0 && zeros == 0 ? 0 : 1;
}
