// Stands in for <immintrin.h> so that tier_avx512_vnni.cpp runs on a machine without AVX-512: every intrinsic that
// the file uses, in plain vector code. It proves the logic of the source, not the instructions. See
// shim_tier_avx512_vnni.cpp and the CMake target check_vectors_shim.
#ifndef INT8MOE_SHIM_IMMINTRIN_H
#define INT8MOE_SHIM_IMMINTRIN_H

#include <stdint.h>
#include <xmmintrin.h>  // _mm_prefetch

namespace int8moe {
namespace {

typedef int32_t Zmm __attribute__((vector_size(64)));

inline Zmm shim_load(const void* p) {
  Zmm v;
  __builtin_memcpy(&v, p, 64);
  return v;
}
inline void shim_store(void* p, Zmm v) { __builtin_memcpy(p, &v, 64); }
inline Zmm shim_set1(int32_t x) { return x - Zmm{}; }

// vpdpbusd: four unsigned bytes of `u` times four signed bytes of `s`, added to the lane.
inline Zmm shim_dpbusd(Zmm sum, Zmm u, Zmm s) {
  typedef uint8_t Bytes __attribute__((vector_size(64)));
  typedef int8_t SignedBytes __attribute__((vector_size(64)));
  const Bytes unsigned_bytes = (Bytes)u;
  const SignedBytes signed_bytes = (SignedBytes)s;
  for (int lane = 0; lane < 16; ++lane)
    for (int d = 0; d < 4; ++d)
      sum[lane] += static_cast<int32_t>(unsigned_bytes[lane * 4 + d]) * static_cast<int32_t>(signed_bytes[lane * 4 + d]);
  return sum;
}

}  // namespace
}  // namespace int8moe

#define __m512i int8moe::Zmm
#define _mm512_setzero_si512() (int8moe::Zmm{})
#define _mm512_loadu_si512(p) int8moe::shim_load(p)
#define _mm512_storeu_si512(p, v) int8moe::shim_store(p, v)
#define _mm512_set1_epi32(x) int8moe::shim_set1(x)
#define _mm512_dpbusd_epi32(sum, u, s) int8moe::shim_dpbusd(sum, u, s)

#endif
