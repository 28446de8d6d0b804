// i8_n16k4, version 1: the one layout of all tiers. Weights are stored as they are: the machine multiplies signed bytes.
#ifndef INT8MOE_S390X_LAYOUT_H
#define INT8MOE_S390X_LAYOUT_H

#include <int8moe/panels.h>

namespace int8moe {
namespace {
using S390xLayout = PanelLayout<16, 4, 0>;
}  // namespace
}  // namespace int8moe
#endif
