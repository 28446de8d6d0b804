// Tier amx_int8: tiles of 16 rows x 64 depths times 64 depths x 16 columns for experts with many rows, and the tiles of
// avx512_vnni for few, from the same packed weights.
//
// | intrinsic        | instruction                  | latency, one per cycles (Sapphire Rapids)          |
// |------------------|------------------------------|----------------------------------------------------|
// | _tile_dpbsud     | tdpbsud tmm, tmm, tmm        | 52, 16: 16 x 16 x 64 products                      |
// | _tile_loadd      | tileloadd tmm, [base+stride] | 16 loads of a line on two ports: 8 cycles from L1  |
// | _tile_stored     | tilestored [base+stride], tmm| 16 stores                                          |
// | _tile_loadconfig | ldtilecfg m512               | clears all tiles; slow, so once a call             |
// | _tile_release    | tilerelease                  | the thread's tile state is then free to save       |
//
// Layout: 16 panel steps of 64 bytes, 1 KiB one after another, are the B tile of 64 depths (unsigned); the A tile
// (signed) is 64 bytes each of 16 prepared rows, by the stride of the rows, so the rows of an expert have to be sorted.
//
//     A  row r, k0..63     at rows + r * stride + k        tmm4, tmm5
//     B  k0..3 of c0..c15, then k4..7, ...                 tmm6, tmm7 (and tmm5)
//     C  row r, c0..c15    int32                           tmm0 .. tmm3 -> acc[panel][32][16]
//
// Blocking: 32 rows x 32 columns, 2 A + 2 B + 4 C = all 8 tiles. Per 64 depths 4 loads (32 cycles of the load ports)
// serve 4 products (64 cycles), and 4 C tiles are as many chains as the latency needs (52 < 4 * 16). Up to 16 rows,
// 1 A x 4 B keeps the 4 chains. There is one configuration, whole tiles: rows beyond an expert's last are the next
// expert's, or spare ones, and what they give is never read. A tile of 4 rows would save about a sixth of the time.
//
// Rows: up to 3 go to vpdpbusd. A product costs the same for 1 as for 16 rows, R rows use R / 16 of its 6 to 7 times
// higher peak, so that the two break even between 2 and 4 rows; below, both wait for memory, and VNNI needs no tiles.
// That is decided for each block of rows: 33 rows are one block of tiles and one row of VNNI.
//
// Caches: at K = 2048 two panels are 64 KiB and 32 rows are 64 KiB, so neither stays in 48 KiB of L1, and no blocking
// of K is done that would make it: C would have to be reloaded for each block. The four panels of a call (128 KiB) and
// the expert's rows stay in 2 MiB of L2 instead: weights come from memory once, for the first 32 rows, and from L2 for
// the others. Each tile step of 64 cycles reads 4 KiB, so L2 can be the limit. Every pass prefetches its own weights a
// few steps ahead into L1; the last of several, what this worker needs next, into L2.
// All of this is reasoned, from measurements of such loops on Sapphire Rapids; this tier has not run on hardware yet.
#if !defined(__AMX_TILE__) || !defined(__AMX_INT8__)
#error "tier_amx_int8.cpp needs -mamx-tile -mamx-int8, and what tile_avx512_vnni.h needs"
#endif

#define INT8MOE_LANES 16
#include <immintrin.h>
#include <int8moe/driver.h>

#include "layout.h"
#include "tile_avx512_vnni.h"

namespace int8moe {
namespace {

// The operand of ldtilecfg, palette 1.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
constexpr TileConfig kWholeTiles = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

struct AmxInt8Kernel {
  using Layout = X86Layout;
  static constexpr int kTileRows = 16;
  static constexpr int kRows = 2 * kTileRows;
  static constexpr int kPanels = 4;
  static constexpr int64_t kRowBytes = 1;
  static constexpr bool kSortedRows = true;
  static constexpr int kFewRows = 3;           // up to here vpdpbusd
  static constexpr int64_t kPrefetch = 8192;   // bytes ahead in each panel: 8 steps of the depth
  static constexpr int64_t kTileBytes = 1024;  // of weights: 64 depths of a panel
  using FewRows = Avx512VnniTile<kFewRows, kRows>;

  static INT8MOE_INLINE void prepare(const int8_t q[64], uint8_t* row, int64_t k0) {
    __builtin_memcpy(row + k0, q, 64);
  }

  // One tile of weights, wherever the next ones are: near ones into L1, those of another expert or block into L2.
  template <bool kNext>
  static INT8MOE_INLINE void prefetch(const uint8_t* weights) {
    __asm__("" : "+r"(weights));  // one base for 16 addresses, or the compiler keeps each in a register of its own
#pragma GCC unroll 16
    for (int64_t line = 0; line < kTileBytes; line += 64) {
      const char* const at = reinterpret_cast<const char*>(weights) + line;
      kNext ? _mm_prefetch(at, _MM_HINT_T1) : _mm_prefetch(at, _MM_HINT_T0);
    }
  }

  // 17 to 32 rows of two panels.
  template <bool kNext>
  static INT8MOE_NOINLINE void tiles_2x2(const uint8_t* rows, int64_t stride, const uint8_t* panel0,
                                         const uint8_t* panel1, int64_t ahead, int64_t depth, int32_t* acc0,
                                         int32_t* acc1) {
    const uint8_t* below = rows + kTileRows * stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (const uint8_t* const end = rows + depth; rows != end; rows += 64, below += 64) {
      _tile_loadd(4, rows, stride);
      _tile_loadd(6, panel0, 64);
      _tile_dpbsud(0, 4, 6);
      prefetch<kNext>(panel0 + ahead);
      _tile_loadd(7, panel1, 64);
      _tile_dpbsud(1, 4, 7);
      prefetch<kNext>(panel1 + ahead);
      _tile_loadd(5, below, stride);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
      panel0 += kTileBytes;
      panel1 += kTileBytes;
    }
    _tile_stored(0, acc0, 64);
    _tile_stored(1, acc1, 64);
    _tile_stored(2, acc0 + kTileRows * 16, 64);
    _tile_stored(3, acc1 + kTileRows * 16, 64);
  }

  // Up to 16 rows of four panels.
  template <bool kNext>
  static INT8MOE_NOINLINE void tiles_1x4(const uint8_t* rows, int64_t stride, const uint8_t* const* panel,
                                         int64_t ahead, int64_t depth, int32_t* const* acc) {
    const uint8_t *b0 = panel[0], *b1 = panel[1], *b2 = panel[2], *b3 = panel[3];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (const uint8_t* const end = rows + depth; rows != end; rows += 64) {
      _tile_loadd(4, rows, stride);
      _tile_loadd(5, b0, 64);
      _tile_dpbsud(0, 4, 5);
      prefetch<kNext>(b0 + ahead);
      _tile_loadd(6, b1, 64);
      _tile_dpbsud(1, 4, 6);
      prefetch<kNext>(b1 + ahead);
      _tile_loadd(7, b2, 64);
      _tile_dpbsud(2, 4, 7);
      prefetch<kNext>(b2 + ahead);
      _tile_loadd(5, b3, 64);
      _tile_dpbsud(3, 4, 5);
      prefetch<kNext>(b3 + ahead);
      b0 += kTileBytes;
      b1 += kTileBytes;
      b2 += kTileBytes;
      b3 += kTileBytes;
    }
    _tile_stored(0, acc[0], 64);
    _tile_stored(1, acc[1], 64);
    _tile_stored(2, acc[2], 64);
    _tile_stored(3, acc[3], 64);
  }

  // Where there are fewer panels than the tiles take, the first one stands in, and its sums go where nobody looks.
  template <bool kNext>
  static INT8MOE_INLINE void many_rows(const GemmBlock<kPanels>& block, const uint8_t* row, int rows, int64_t ahead,
                                       int32_t* acc) {
    const uint8_t* panel[kPanels];
    int32_t* out[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      panel[p] = p < block.panels ? block.panel[p] : block.panel[0];
      out[p] = acc + p * kRows * 16;
    }
    if (rows <= kTileRows) return tiles_1x4<kNext>(row, block.row_stride, panel, ahead, block.depth, out);
    for (int p = 0; p < block.panels; p += 2)
      tiles_2x2<kNext>(row, block.row_stride, panel[p], panel[p + 1], ahead, block.depth, out[p], out[p + 1]);
  }

  // The 2x2 loop on operands that stay in L1.
  static INT8MOE_NOINLINE int64_t peak(int64_t iterations) {
    constexpr int kSteps = 4;
    alignas(64) uint8_t rows[2 * kSteps * kTileBytes], weights[2 * kSteps * kTileBytes];
    alignas(64) int32_t acc[4 * 256];
    __builtin_memset(rows, 3, sizeof rows);
    __builtin_memset(weights, 5, sizeof weights);
    __asm__ volatile("" : : "r"(rows), "r"(weights) : "memory");  // tile loads do not tell the compiler what they read
    _tile_loadconfig(&kWholeTiles);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t n = 0; n < iterations; ++n)
      for (int64_t at = 0; at < 2 * kSteps * kTileBytes; at += 2 * kTileBytes) {
        const uint8_t *a = rows + at, *b = weights + at;
        __asm__("" : "+r"(a), "+r"(b));  // as above
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, b + kTileBytes, 64);
        _tile_dpbsud(1, 4, 7);
        _tile_loadd(5, a + kTileBytes, 64);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
    _tile_stored(0, acc, 64);
    _tile_stored(1, acc + 256, 64);
    _tile_stored(2, acc + 512, 64);
    _tile_stored(3, acc + 768, 64);
    _tile_release();
    return iterations * kSteps * 4 * (16 * 16 * 64);
  }

  template <class Epilogue>
  static INT8MOE_INLINE void gemm(const GemmBlock<kPanels>& block, Epilogue&& epilogue) {
    alignas(64) int32_t acc[kPanels * kRows * 16];
    const bool tiles = block.rows > kFewRows;  // then the first block of rows wants them
    if (tiles) _tile_loadconfig(&kWholeTiles);
    for (int64_t r0 = 0; r0 < block.rows; r0 += kRows) {
      const int rows = static_cast<int>(block.rows - r0 < kRows ? block.rows - r0 : kRows);
      // The last of several passes over the panels fetches what comes next; the others, their own streams.
      const bool fetch_next = r0 > 0 && r0 + kRows >= block.rows;
      if (rows <= kFewRows) {
        const uint8_t* row[kFewRows];
        for (int r = 0; r < rows; ++r) row[r] = block.row(r0 + r);
        FewRows::all_panels(block, fetch_next ? block.next_offset : FewRows::kPrefetch, row, rows, acc);
      } else if (fetch_next) {
        many_rows<true>(block, block.row(r0), rows, block.next_offset, acc);
      } else {
        many_rows<false>(block, block.row(r0), rows, kPrefetch, acc);
      }
      epilogue(r0, rows, acc);
    }
    if (tiles) _tile_release();
  }
};

}  // namespace
}  // namespace int8moe

INT8MOE_DEFINE_TIER(amx_int8, int8moe::AmxInt8Kernel)
