// Tier avx2: u8 weights and s8 activations without an 8-bit dot product.
//
// | intrinsic                 | instruction          | latency, per cycle (Zen 3 / Skylake) |
// |---------------------------|----------------------|--------------------------------------|
// | _mm256_madd_epi16         | vpmaddwd ymm         | 3, 2 / 5, 2                          |
// | _mm256_add_epi32          | vpaddd ymm           | 1, 4 / 1, 3                          |
// | _mm256_and_si256          | vpand ymm            | 1, 4 / 1, 3                          |
// | _mm256_srli_epi16         | vpsrlw ymm           | 1, 2 / 1, 2                          |
// | _mm256_set1_epi32 (load)  | vpbroadcastd ymm,m32 | load port only                       |
//
// Layout: a panel step is 64 bytes, 16 columns x 4 depths; one ymm is 8 columns. As 16-bit lanes a column is
//
//     bytes  w0 w1 w2 w3      even = v & 0x00FF : w0, w2      odd = v >> 8 : w1, w3
//
// so activations are prepared as 16-bit pairs (a0, a2), (a1, a3), 8 bytes per 4 depths, and
// madd(even, (a0, a2)) + madd(odd, (a1, a3)) is the exact sum of four products: at most 2 * 255 * 128 each,
// far from any limit. vpmaddubsw is not used: its 16-bit sums saturate (255 * 127 * 2 > 32767).
//
// Blocking: 4 rows x 1 panel is 8 accumulators + 4 registers of widened weights + the mask + broadcasts = 16 ymm.
// Widening (and, shift) is shared by the 4 rows: 36 vector operations, of which 16 vpmaddwd at 2 per cycle,
// for 4 x 64 products. With fewer rows the loop is bound by memory, and several panels are walked side by side: four
// streams keep more lines in flight than one. Two rows x 4 panels spill accumulators, and are still faster so (measured
// on Zen 3 against reading the same bytes: 1 row 1.04 with 4 panels, 0.90 with 1; 2 rows 1.03 with 4, 0.95 with 2;
// 3 rows 0.89 with 2, 0.85 with 1; 4 rows are bound by arithmetic, one panel is best).
#if !defined(__AVX2__)
#error "tier_avx2.cpp needs -mavx2"
#endif
#if defined(__FMA__) || defined(__AVX512F__)
#error "tier_avx2.cpp is built for AVX2 and nothing above: no -mfma, no -mavx512f"
#endif

#define INT8MOE_LANES 8
#include <immintrin.h>
#include <int8moe/driver.h>

#include "layout.h"

namespace int8moe {
namespace {

struct Avx2Kernel {
  using Layout = X86Layout;
  static constexpr int kRows = 4;
  static constexpr int kPanels = 4;
  static constexpr int64_t kRowBytes = 2;
  static constexpr int64_t kNear = 384;  // bytes to fetch ahead in each of several streams of weights,
  static constexpr int64_t kFar = 4096;  // and in a single one

  static INT8MOE_INLINE void prepare(const int8_t q[64], uint8_t* row, int64_t k0) {
    uint8_t* out = row + k0 * kRowBytes;
    for (int i = 0; i < 64; i += 16) {
      const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(q + i));
      __m256i words = _mm256_cvtepi8_epi16(bytes);
      words = _mm256_shufflelo_epi16(words, _MM_SHUFFLE(3, 1, 2, 0));
      words = _mm256_shufflehi_epi16(words, _MM_SHUFFLE(3, 1, 2, 0));
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + i * kRowBytes), words);
    }
  }

  // Four bytes of a prepared row, in every lane.
  static INT8MOE_INLINE __m256i broadcast(const uint8_t* pair) {
    int32_t bits;
    __builtin_memcpy(&bits, pair, 4);
    return _mm256_set1_epi32(bits);
  }

  // The empty statement keeps the compiler from adding the two products of a column first, which needs more
  // registers than there are: 16 accumulating chains in place, nothing spilled.
  static INT8MOE_INLINE void add_products(__m256i& sum, __m256i weights, __m256i activations) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(weights, activations));
    __asm__("" : "+x"(sum));
  }

  // Loops over rows and panels are unrolled: accumulators in an array that is indexed at run time live in memory.
  template <int kTileRows, int kTilePanels>
  static INT8MOE_NOINLINE void tile(const uint8_t* const* panel, int64_t ahead, const uint8_t* const* row,
                                    int64_t depth, int32_t* acc) {
    const __m256i low_bytes = _mm256_set1_epi16(0x00FF);
    __m256i sum[kTileRows][kTilePanels][2];
    const uint8_t* a[kTileRows];
    const uint8_t* b[kTilePanels];
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; ++r) {
      a[r] = row[r];
#pragma GCC unroll 4
      for (int p = 0; p < kTilePanels; ++p) sum[r][p][0] = sum[r][p][1] = _mm256_setzero_si256();
    }
#pragma GCC unroll 4
    for (int p = 0; p < kTilePanels; ++p) b[p] = panel[p];
    for (int64_t at = 0; at < depth * kRowBytes; at += 8) {
#pragma GCC unroll 4
      for (int p = 0; p < kTilePanels; ++p) {
        const uint8_t* const w = b[p] + at * 8;
        _mm_prefetch(reinterpret_cast<const char*>(w) + ahead, _MM_HINT_T0);
        const __m256i left = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
        const __m256i right = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32));
        const __m256i even0 = _mm256_and_si256(left, low_bytes), odd0 = _mm256_srli_epi16(left, 8);
        const __m256i even1 = _mm256_and_si256(right, low_bytes), odd1 = _mm256_srli_epi16(right, 8);
#pragma GCC unroll 4
        for (int r = 0; r < kTileRows; ++r) {
          const __m256i a02 = broadcast(a[r] + at);
          add_products(sum[r][p][0], even0, a02);
          add_products(sum[r][p][1], even1, a02);
          const __m256i a13 = broadcast(a[r] + at + 4);
          add_products(sum[r][p][0], odd0, a13);
          add_products(sum[r][p][1], odd1, a13);
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kTilePanels; ++p)
#pragma GCC unroll 4
      for (int r = 0; r < kTileRows; ++r) {
        int32_t* out = acc + (p * kRows + r) * 16;
        _mm256_store_si256(reinterpret_cast<__m256i*>(out), sum[r][p][0]);
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + 8), sum[r][p][1]);
      }
  }

  // As many panels at once as `kTogether` says, then pairs, then one by one.
  template <int kTileRows, int kTogether>
  static INT8MOE_INLINE void tiles(const GemmBlock<kPanels>& block, int64_t ahead, const uint8_t* const* row,
                                   int32_t* acc) {
    int p = 0;
    for (; p + kTogether <= block.panels; p += kTogether)
      tile<kTileRows, kTogether>(block.panel + p, ahead, row, block.depth, acc + p * kRows * 16);
    if (kTogether > 2)
      for (; p + 2 <= block.panels; p += 2)
        tile<kTileRows, 2>(block.panel + p, ahead, row, block.depth, acc + p * kRows * 16);
    if (kTogether > 1)
      for (; p < block.panels; ++p)
        tile<kTileRows, 1>(block.panel + p, ahead, row, block.depth, acc + p * kRows * 16);
  }

  // vpmaddwd and vpaddd on registers: weights and activations already widened, 10 chains.
  static INT8MOE_NOINLINE int64_t peak(int64_t iterations) {
    constexpr int kChains = 10, kUnrolled = 16;
    __m256i sum[kChains], w = _mm256_set1_epi16(3), x = _mm256_set1_epi16(5);
#pragma GCC unroll 10
    for (int i = 0; i < kChains; ++i) {
      sum[i] = _mm256_setzero_si256();
      __asm__ volatile("" : "+x"(sum[i]));  // chains of equal value would be one
    }
    for (int64_t n = 0; n < iterations * kUnrolled; ++n) {
#pragma GCC unroll 10
      for (int i = 0; i < kChains; ++i) {
        __asm__ volatile("" : "+x"(w), "+x"(x));  // or one product would serve all chains
        add_products(sum[i], w, x);
      }
    }
#pragma GCC unroll 10
    for (int i = 0; i < kChains; ++i) __asm__ volatile("" : : "x"(sum[i]));
    return iterations * kUnrolled * kChains * 16;
  }

  template <class Epilogue>
  static INT8MOE_INLINE void gemm(const GemmBlock<kPanels>& block, Epilogue&& epilogue) {
    alignas(64) int32_t acc[kPanels * kRows * 16];
    const uint8_t* row[kRows];
    for (int64_t r0 = 0; r0 < block.rows; r0 += kRows) {
      const int rows = static_cast<int>(block.rows - r0 < kRows ? block.rows - r0 : kRows);
      for (int r = 0; r < rows; ++r) row[r] = block.row(r0 + r);
      // The last of several passes over the panels fetches what comes next; the others, their own streams.
      const bool last_of_several = r0 > 0 && r0 + kRows >= block.rows;
      const int64_t near = last_of_several ? block.next_offset : kNear, far = last_of_several ? near : kFar;
      switch (rows) {
        case 1: tiles<1, 4>(block, near, row, acc); break;
        case 2: tiles<2, 4>(block, near, row, acc); break;
        case 3: tiles<3, 2>(block, near, row, acc); break;
        default: tiles<4, 1>(block, far, row, acc); break;
      }
      epilogue(r0, rows, acc);
    }
  }
};

}  // namespace
}  // namespace int8moe

INT8MOE_DEFINE_TIER(avx2, int8moe::Avx2Kernel)
