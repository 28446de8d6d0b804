// Tier vxe: the vector-enhancements facility 1 of z14, which adds single precision: the float steps of the driver become
// vectors, too. The integer sums are those of tile_vx.h.
//
// There is no tier for the facility 2 of z15: of all that a forward does it speeds up only int32 -> fp32, one instruction of
// about thirty for each element of an intermediate.
#if !defined(__VX__) || !defined(__VEC__)
#error "tier_vxe.cpp needs -march=z14 -mzvector"
#endif
#if __ARCH__ != 12
#error "tier_vxe.cpp is built for z14 and nothing else: neither -march=z13 nor -march=z15"
#endif

#define INT8MOE_LANES 4
#include "tile_vx.h"

INT8MOE_DEFINE_TIER(vxe, int8moe::VxKernel)
