// s8_n8k8, version 1: the one layout of all AArch64 tiers.
//
// A group is 8 columns x 8 depths, one cache line and four vectors, each of two columns:
//
//     c0 k0..7 | c1 k0..7     c2 k0..7 | c3 k0..7     c4 k0..7 | c5 k0..7     c6 k0..7 | c7 k0..7
//
// So a vector is an operand of smmla; two columns by two groups of four depths for sdot; and two operands of smull.
// Activations are signed, too, so weights are stored as they are and need no compensation.
#ifndef INT8MOE_AARCH64_LAYOUT_H
#define INT8MOE_AARCH64_LAYOUT_H

#include <int8moe/panels.h>

namespace int8moe {
namespace {
using Aarch64Layout = PanelLayout<8, 8, 0>;
}  // namespace
}  // namespace int8moe
#endif
