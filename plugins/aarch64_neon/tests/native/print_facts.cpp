// Prints what the dispatcher's probe finds, as the bytes of int8moe_aarch64_facts in hexadecimal.
#include <stdio.h>

#include "dispatcher.h"

int main() {
  int8moe_aarch64_facts facts = {};
  facts.struct_bytes = sizeof facts;
  if (int8moe_aarch64_probe(&facts) != INT8MOE_OK) return 1;
  for (size_t i = 0; i < sizeof facts; ++i) printf("%02x", reinterpret_cast<unsigned char*>(&facts)[i]);
  printf("\n");
  return 0;
}
