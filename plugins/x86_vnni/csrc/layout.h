// u8_n16k4, version 1: the one layout of all x86 tiers (VNNI operands, AMX B tiles, and bytes for AVX2).
#ifndef INT8MOE_X86_LAYOUT_H
#define INT8MOE_X86_LAYOUT_H

#include <int8moe/panels.h>

namespace int8moe {
namespace {
using X86Layout = PanelLayout<16, 4, 128>;
}  // namespace
}  // namespace int8moe
#endif
