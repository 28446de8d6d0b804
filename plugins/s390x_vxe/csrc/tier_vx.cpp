// Tier vx: the vector facility of z13. Its vectors of floats are double precision only, so the compiler takes the float
// steps of the driver apart into scalar instructions; the integer sums are those of tile_vx.h.
#if !defined(__VX__) || !defined(__VEC__)
#error "tier_vx.cpp needs -march=z13 -mzvector"
#endif
#if __ARCH__ != 11
#error "tier_vx.cpp is built for z13 and nothing above: no -march=z14"
#endif

#define INT8MOE_LANES 4
#include "tile_vx.h"

INT8MOE_DEFINE_TIER(vx, int8moe::VxKernel)
