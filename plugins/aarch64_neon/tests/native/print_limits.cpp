// Prints what a benchmark asks of a tier: the multiply-adds of one and of three rounds of its fastest loop, and what
// reading a buffer with one odd byte, its last, finds.
//
//   print_limits TIER
#include <stdio.h>
#include <string.h>

#include <int8moe/abi.h>

static unsigned char buffer[1000];

int main(int argc, char** argv) {
  for (int32_t tier = 0; argc == 2 && tier < int8moe_tier_count(); ++tier) {
    if (strcmp(int8moe_tier_name(tier), argv[1]) != 0) continue;
    buffer[999] = 7;
    const long long once = int8moe_run_peak(tier, 1, 1), thrice = int8moe_run_peak(tier, 1, 3);
    printf("%lld %lld %d\n", once, thrice, int8moe_read_memory(tier, 1, buffer, sizeof buffer));
    return 0;
  }
  fprintf(stderr, "usage: print_limits TIER\n");
  return 2;
}
