// Tier avx512_vnni against shim/immintrin.h: its logic on a machine that has AVX2 only.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512VNNI__ 1
#include "../../csrc/tier_avx512_vnni.cpp"
