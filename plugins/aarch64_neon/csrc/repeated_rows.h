// Rows of activations in which each 8 bytes stand twice, so that one load fills both halves of a vector: what the tiers
// dotprod and neon multiply with a vector of weights, which is two columns. A broadcasting load would need none of this
// room, but on many cores it takes a slot of the vector units that the products need.
#ifndef INT8MOE_AARCH64_REPEATED_ROWS_H
#define INT8MOE_AARCH64_REPEATED_ROWS_H

#include <arm_neon.h>
#include <int8moe/vectors.h>

namespace int8moe {
namespace {

constexpr int64_t kRepeats = 2;

INT8MOE_INLINE void prepare_repeated(const int8_t q[64], uint8_t* row, int64_t k0) {
  uint8_t* const out = row + k0 * kRepeats;
#pragma GCC unroll 4
  for (int i = 0; i < 64; i += 16) {
    const int64x2_t two = vreinterpretq_s64_s8(vld1q_s8(q + i));
    vst1q_u8(out + i * kRepeats, vreinterpretq_u8_s64(vdupq_laneq_s64(two, 0)));
    vst1q_u8(out + i * kRepeats + 16, vreinterpretq_u8_s64(vdupq_laneq_s64(two, 1)));
  }
}

}  // namespace
}  // namespace int8moe
#endif
