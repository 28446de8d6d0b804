/* What the emulated AMX does, for test_emulation.py. Exit status: 0 right, 1 wrong, 2 usage.
 *
 *   products    compares the four TDPB instructions with scalar code, for random shapes, strides and operands
 *   addresses   loads and stores through every kind of address
 *   state       configuration and data: what each instruction leaves and clears, the red zone of the stack included
 *   palette, reserved, wide, half, unconfigured, mismatch, same, unmapped, constant    what programs should not do
 */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define AMX __attribute__((target("amx-tile,amx-int8"), noinline))
enum { kRounds = 200, kTiles = 8, kRows = 16, kRowBytes = 64 };

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t colsb[16];
  uint8_t rows[16];
} Config;

static uint32_t next_random(void) {
  static uint64_t state = 88172645463325252u;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (uint32_t)(state >> 16);
}

static void fill(void* memory, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) ((uint8_t*)memory)[i] = (uint8_t)next_random();
}

static Config whole_tiles(void) {
  Config config = {.palette = 1};
  for (int t = 0; t < kTiles; ++t) {
    config.rows[t] = kRows;
    config.colsb[t] = kRowBytes;
  }
  return config;
}

static int differs(const char* what, int round) {
  printf("%s, round %d: differs\n", what, round);
  return 1;
}

/* ---------------------------------------------------------------------------------- products */

enum { kRoom = kRows * 96 };
static _Alignas(64) uint8_t left[kRoom], right[kRoom], start[kRoom], found[kRoom], expected[kRoom];

/* Tiles 1 and 2 are sources, 7 is the target. */
AMX static void multiply(int kind, const Config* config, long stride) {
  _tile_loadconfig(config);
  _tile_loadd(7, start, stride);
  _tile_loadd(1, left, stride);
  _tile_stream_loadd(2, right, stride);
  switch (kind) {
    case 0: _tile_dpbssd(7, 1, 2); break;
    case 1: _tile_dpbsud(7, 1, 2); break;
    case 2: _tile_dpbusd(7, 1, 2); break;
    default: _tile_dpbuud(7, 1, 2); break;
  }
  _tile_stored(7, found, stride);
  _tile_release();
}

static int32_t operand(const uint8_t* byte, int is_signed) { return is_signed ? (int8_t)*byte : *byte; }

static void multiply_scalar(int kind, int rows, int groups, int columns, long stride) {
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < columns; ++n) {
      int32_t first;
      memcpy(&first, start + m * stride + 4 * n, 4);
      uint32_t sum = (uint32_t)first; /* wraps around, does not saturate */
      for (int k = 0; k < groups; ++k)
        for (int i = 0; i < 4; ++i)
          sum += (uint32_t)(operand(left + m * stride + 4 * k + i, kind < 2) *
                            operand(right + k * stride + 4 * n + i, kind % 2 == 0));
      memcpy(expected + m * stride + 4 * n, &sum, 4);
    }
}

static int check_products(void) {
  for (int round = 0; round < kRounds; ++round) {
    const int kind = round % 4;
    const int whole = round < 8; /* then every shape */
    const int rows = whole ? 16 : (int)(1 + next_random() % 16), groups = whole ? 16 : (int)(1 + next_random() % 16);
    const int columns = whole ? 16 : (int)(1 + next_random() % 16);
    const long stride = 64 + (long)(next_random() % 9) * 4;
    Config config = {.palette = 1};
    config.rows[7] = config.rows[1] = (uint8_t)rows;
    config.rows[2] = (uint8_t)groups;
    config.colsb[7] = config.colsb[2] = (uint16_t)(4 * columns);
    config.colsb[1] = (uint16_t)(4 * groups);
    fill(left, sizeof left);
    fill(right, sizeof right);
    fill(start, sizeof start);
    if (round < 4) { /* the largest products, and a sum that passes 2^31 */
      memset(left, 0x80, sizeof left);
      memset(right, round % 2 == 0 ? 0x80 : 0xFF, sizeof right);
      memset(start, 0x7F, sizeof start);
    }
    fill(found, sizeof found); /* bytes between the rows stay */
    memcpy(expected, found, sizeof found);
    multiply(kind, &config, stride);
    multiply_scalar(kind, rows, groups, columns, stride);
    if (memcmp(found, expected, sizeof found) != 0) return differs("products", round);
  }
  printf("%d rounds equal\n", kRounds);
  return 0;
}

/* ---------------------------------------------------------------------------------- addresses */

static uint8_t source[64 * 64], target[64 * 64];

/* 16 rows of 64 bytes, `stride` apart, of source from byte `offset` on. */
static int copied(const char* what, long offset, long stride) {
  for (int row = 0; row < kRows; ++row)
    if (memcmp(target + 64 * row, source + offset + row * stride, 64) != 0) return differs(what, row);
  fill(target, sizeof target);
  return 0;
}

#define LOAD(operand, ...) __asm__ volatile("tileloadd " operand ", %%tmm3" : : __VA_ARGS__ : "memory")
#define FIXED(name, wanted, value) register const void* name __asm__(wanted) = (const void*)(value)

AMX static int check_addresses(void) {
  const Config config = whole_tiles();
  _tile_loadconfig(&config);
  const long one = 64;
  int wrong = 0;
  fill(source, sizeof source);

  LOAD("(%0,%1,1)", "r"(source), "r"(one));
  _tile_stored(3, target, 64);
  wrong |= copied("base and index", 0, 64);

  LOAD("100(%0,%1,2)", "r"(source), "r"(one));
  _tile_stored(3, target, 64);
  wrong |= copied("short displacement, scale 2", 100, 128);

  LOAD("-2000(%0,%1,2)", "r"(source + 2048), "r"(one));
  _tile_stored(3, target, 64);
  wrong |= copied("long displacement", 48, 128);

  LOAD("(%0,%1,1)", "r"(source + 15 * 64), "r"(-one));
  _tile_stored(3, target, 64);
  wrong |= copied("negative stride", 15 * 64, -64);

  LOAD("(%0)", "r"(source + 7));
  _tile_stored(3, target, 64);
  wrong |= copied("no index", 7, 0);

  {
    FIXED(r13, "r13", source); /* needs a displacement, as RBP */
    FIXED(r12, "r12", one);    /* is an index, unlike RSP */
    LOAD("(%0,%1,1)", "r"(r13), "r"(r12));
  }
  _tile_stored(3, target, 64);
  wrong |= copied("r13 and r12", 0, 64);
  {
    FIXED(r12, "r12", source); /* needs a SIB byte anyway */
    FIXED(r9, "r9", one / 8);
    LOAD("5(%0,%1,8)", "r"(r12), "r"(r9));
  }
  _tile_stored(3, target, 64);
  wrong |= copied("r12 and r9, scale 8", 5, 64);

  /* No base: an absolute address, and an index alone. */
  LOAD("source(,%0,1)", "r"(one));
  _tile_stored(3, target, 64);
  wrong |= copied("no base", 0, 64);

  /* On the stack, with RSP as the base. */
  __asm__ volatile(
      "sub $2048, %%rsp\n\t"
      "tilestored %%tmm3, 64(%%rsp,%1,1)\n\t"
      "tileloadd 64(%%rsp,%1,1), %%tmm5\n\t"
      "add $2048, %%rsp\n\t"
      "tilestored %%tmm5, (%0,%1,1)"
      :
      : "r"(target), "r"(one)
      : "memory");
  wrong |= copied("rsp", 0, 64);

  /* Configurations: relative to RIP, and with an index. */
  static Config there;
  __asm__ volatile("sttilecfg %0" : "=m"(there));
  wrong |= memcmp(&there, &config, sizeof there) != 0 ? differs("relative to rip", 0) : 0;
  __asm__ volatile("sttilecfg 64(%0,%1,4)" : : "r"(target), "r"(one) : "memory");
  wrong |= memcmp(target + 320, &config, sizeof config) != 0 ? differs("configuration with an index", 0) : 0;
  _tile_release();
  if (!wrong) printf("addresses equal\n");
  return wrong;
}

/* ---------------------------------------------------------------------------------- state */

AMX static int check_state(void) {
  static const uint8_t zeros[kRows * kRowBytes];
  Config config = whole_tiles(), now;
  config.rows[4] = 3;
  config.colsb[4] = 20;
  fill(source, sizeof source);
  _tile_storeconfig(&now);
  if (memcmp(&now, zeros, sizeof now) != 0) return differs("at the start", 0);

  _tile_loadconfig(&config);
  _tile_loadd(4, source, 64); /* 3 rows of 20 bytes */
  fill(target, sizeof target);
  memcpy(found, target, sizeof found);
  _tile_stored(4, target, 64);
  for (int row = 0; row < 3; ++row) memcpy(found + 64 * row, source + 64 * row, 20);
  if (memcmp(target, found, sizeof found) != 0) return differs("a small tile", 0);

  _tile_loadd(0, source, 64);
  _tile_zero(0);
  _tile_stored(0, target, 64);
  if (memcmp(target, zeros, sizeof zeros) != 0) return differs("tilezero", 0);

  _tile_loadd(0, source, 64);
  _tile_loadconfig(&config); /* clears the data */
  _tile_stored(0, target, 64);
  if (memcmp(target, zeros, sizeof zeros) != 0) return differs("ldtilecfg", 0);

  /* A load from row 2 on, as after an interruption: rows 0 and 1 keep what they have, and start_row is used up. */
  _tile_loadd(0, source, 64);
  config.start_row = 2;
  _tile_loadconfig(&config);
  _tile_storeconfig(&now);
  if (now.start_row != 2) return differs("start_row", 0);
  _tile_loadd(0, source, 64);
  _tile_storeconfig(&now);
  if (now.start_row != 0) return differs("start_row", 1);
  _tile_stored(0, target, 64);
  if (memcmp(target, zeros, 128) != 0 || memcmp(target + 128, source + 128, 14 * 64) != 0)
    return differs("start_row", 2);

  _tile_release();
  _tile_storeconfig(&now);
  if (memcmp(&now, zeros, sizeof now) != 0) return differs("tilerelease", 0);
  config.palette = 0; /* the initial state, whatever the rest says */
  _tile_loadconfig(&config);
  _tile_storeconfig(&now);
  if (memcmp(&now, zeros, sizeof now) != 0) return differs("palette 0", 0);

  /* The red zone, flags and registers survive an emulated instruction. */
  uint64_t below = 0, carry = 0;
  __asm__ volatile(
      "movq %2, -8(%%rsp)\n\t"
      "movq %2, -128(%%rsp)\n\t"
      "stc\n\t"
      "tilerelease\n\t"
      "setc %b1\n\t"
      "movq -8(%%rsp), %0\n\t"
      "andq -128(%%rsp), %0"
      : "=&r"(below), "+&q"(carry)
      : "r"(UINT64_C(0x0123456789ABCDEF))
      : "cc", "memory");
  if (below != UINT64_C(0x0123456789ABCDEF) || carry != 1) return differs("red zone or flags", 0);
  printf("state equal\n");
  return 0;
}

/* ---------------------------------------------------------------------------------- mistakes */

AMX static int make_mistake(const char* what) {
  Config config = whole_tiles();
  config.rows[5] = 15;
  if (strcmp(what, "unconfigured") == 0) config.rows[1] = config.colsb[1] = 0;
  if (strcmp(what, "palette") == 0) config.palette = 2;
  if (strcmp(what, "reserved") == 0) config.rows[8] = 1;
  if (strcmp(what, "wide") == 0) config.colsb[1] = 65;
  if (strcmp(what, "half") == 0) config.rows[1] = 0;
  _tile_loadconfig(&config);
  if (strcmp(what, "unconfigured") == 0) _tile_loadd(1, source, 64);
  if (strcmp(what, "mismatch") == 0) _tile_dpbssd(0, 5, 2);
  if (strcmp(what, "same") == 0) __asm__ volatile(".byte 0xC4, 0xE2, 0x73, 0x5E, 0xC1"); /* tdpbssd tmm1, tmm1, tmm0 */
  if (strcmp(what, "unmapped") == 0) _tile_loadd(1, (const void*)8, 0);
  if (strcmp(what, "constant") == 0) {
    static const uint8_t constant[kRowBytes] = {1};
    _tile_stored(1, (void*)(uintptr_t)constant, 0);
  }
  printf("not noticed\n");
  return 1;
}

int main(int argc, char** argv) {
  const char* what = argc > 1 ? argv[1] : "";
  if (strcmp(what, "products") == 0) return check_products();
  if (strcmp(what, "addresses") == 0) return check_addresses();
  if (strcmp(what, "state") == 0) return check_state();
  if (argc > 1) return make_mistake(what);
  fprintf(stderr, "see the comment at the top of check_tiles.c\n");
  return 2;
}
