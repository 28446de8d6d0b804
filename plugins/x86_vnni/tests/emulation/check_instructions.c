/* What the emulated processor does, for test_emulation.py. Exit status: 0 right, 1 wrong, 2 usage.
 *
 *   cpuid             prints the features that matter here
 *   zmm, vex          compares VPDPBUSD, in its AVX512-VNNI or AVX-VNNI form, with scalar code
 *   sum FILE          prints the size of a file and the sum of its bytes
 *   status N          exits with N
 *   null, constant, undefined, spin, abort    what programs should not do
 */
#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kLanes = 16, kRounds = 1000 };

static int32_t start[kLanes], expected[kLanes], found[kLanes];
static uint8_t left[kLanes * 4];
static int8_t right[kLanes * 4];

static uint32_t next_random(void) {
  static uint64_t state = 88172645463325252u;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (uint32_t)(state >> 16);
}

__attribute__((target("avx512f,avx512vnni"), noinline)) static void dot_zmm(void) {
  const __m512i sum = _mm512_dpbusd_epi32(_mm512_loadu_si512(start), _mm512_loadu_si512(left),
                                          _mm512_loadu_si512(right));
  _mm512_storeu_si512(found, sum);
}

__attribute__((target("avx2"), noinline)) static void dot_vex(void) {
  for (int half = 0; half < 2; ++half) {
    register __m256i sum __asm__("ymm0") = _mm256_loadu_si256((const __m256i*)start + half);
    register __m256i l __asm__("ymm1") = _mm256_loadu_si256((const __m256i*)left + half);
    register __m256i r __asm__("ymm2") = _mm256_loadu_si256((const __m256i*)right + half);
    /* {vex} vpdpbusd %ymm2, %ymm1, %ymm0, for assemblers that do not know it. */
    __asm__ volatile(".byte 0xC4, 0xE2, 0x75, 0x50, 0xC2" : "+x"(sum) : "x"(l), "x"(r));
    _mm256_storeu_si256((__m256i*)found + half, sum);
  }
}

static int compare(void (*dot)(void)) {
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kLanes * 4; ++i) {
      left[i] = round == 0 ? 255 : (uint8_t)next_random();
      right[i] = round == 0 ? -128 : (int8_t)next_random();
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      start[lane] = round == 0 ? INT32_MIN : (int32_t)next_random(); /* wraps around, does not saturate */
      uint32_t sum = (uint32_t)start[lane];
      for (int i = lane * 4; i < lane * 4 + 4; ++i) sum += (uint32_t)(left[i] * right[i]);
      expected[lane] = (int32_t)sum;
    }
    dot();
    if (memcmp(found, expected, sizeof found) != 0) {
      printf("round %d differs\n", round);
      return 1;
    }
  }
  printf("%d rounds equal\n", kRounds);
  return 0;
}

static int print_features(void) {
  unsigned a, b, c, d, vex = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 1;
  const unsigned avx2 = b >> 5 & 1, avx512f = b >> 16 & 1, avx512_vnni = c >> 11 & 1;
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) vex = a >> 4 & 1;
  printf("avx2=%u avx512f=%u avx512_vnni=%u avx_vnni=%u\n", avx2, avx512f, avx512_vnni, vex);
  return 0;
}

static int sum_file(const char* path) {
  FILE* file = fopen(path, "rb");
  if (file == NULL) {
    perror(path);
    return 1;
  }
  fseek(file, 0, SEEK_END);
  const long size = ftell(file);
  rewind(file);
  unsigned char* bytes = malloc((size_t)size);
  if (bytes == NULL || fread(bytes, 1, (size_t)size, file) != (size_t)size) return 1;
  unsigned long sum = 0;
  for (long i = 0; i < size; ++i) sum += bytes[i];
  printf("%ld bytes, sum %lu\n", size, sum);
  free(bytes);
  fclose(file);
  return 0;
}

int main(int argc, char** argv) {
  static const char constant[] = "constant";
  const char* what = argc > 1 ? argv[1] : "";
  if (strcmp(what, "cpuid") == 0) return print_features();
  if (strcmp(what, "zmm") == 0) return compare(dot_zmm);
  if (strcmp(what, "vex") == 0) return compare(dot_vex);
  if (strcmp(what, "sum") == 0 && argc > 2) return sum_file(argv[2]);
  if (strcmp(what, "status") == 0 && argc > 2) return atoi(argv[2]);
  if (strcmp(what, "null") == 0) return *(volatile char*)(uintptr_t)(argc - 2);
  if (strcmp(what, "constant") == 0) return *(volatile char*)(uintptr_t)constant = 0;
  if (strcmp(what, "undefined") == 0) __builtin_trap();
  if (strcmp(what, "abort") == 0) abort();
  if (strcmp(what, "spin") == 0)
    for (volatile int i = 0;; ++i) continue;
  fprintf(stderr, "see the comment at the top of check_instructions.c\n");
  return 2;
}
