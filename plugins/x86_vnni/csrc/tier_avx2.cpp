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
// Blocking: 6 rows x 1 panel is 12 accumulators + 2 registers of widened weights + a broadcast + a product = 16 ymm. The
// even bytes of a step are used for all rows, then its odd bytes, loaded again; the mask is a memory operand. That is 52
// vector operations for 6 x 64 products, 24 of them vpmaddwd at 2 per cycle: 0.91 of the unit's peak on a quiet Zen 3.
// Which loop is the outer one (rows, panels) and whether a panel lies in L1 or L2 made no difference there.
// With fewer rows the loop is bound by memory, and several panels are walked side by side: four streams keep more lines
// in flight than one. Two rows x 4 panels spill accumulators, and are still faster so (measured on Zen 3 against reading
// the same bytes: 1 row 1.04 with 4 panels, 0.90 with 1; 2 rows 1.03 with 4, 0.95 with 2; 3 rows 0.89 with 2, 0.85 with
// 1; 4 rows are bound by arithmetic, one panel is best).
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
  static constexpr int kRows = 6;
  static constexpr int kPanels = 4;
  static constexpr int64_t kRowBytes = 2;
  static constexpr bool kSortedRows = false;
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

  static INT8MOE_INLINE __m256i load_weights(const uint8_t* weights) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights));
  }

  // The mask comes from memory: six rows leave no register for it.
  static INT8MOE_INLINE __m256i even_bytes(__m256i weights, const uint16_t* mask) {
    __asm__("vpand %1, %0, %0" : "+x"(weights) : "m"(*reinterpret_cast<const __m256i*>(mask)));
    return weights;
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
    alignas(32) static const uint16_t low_bytes[16] = {255, 255, 255, 255, 255, 255, 255, 255,
                                                       255, 255, 255, 255, 255, 255, 255, 255};
    __m256i sum[kTileRows][kTilePanels][2];
    const uint8_t* a[kTileRows];
    const uint8_t* b[kTilePanels];
#pragma GCC unroll 6
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
        _mm_prefetch(reinterpret_cast<const char*>(w) + ahead, _MM_HINT_T1);  // rows are what L1 is for
        const __m256i even0 = even_bytes(load_weights(w), low_bytes), even1 = even_bytes(load_weights(w + 32), low_bytes);
#pragma GCC unroll 6
        for (int r = 0; r < kTileRows; ++r) {
          const __m256i a02 = broadcast(a[r] + at);
          add_products(sum[r][p][0], even0, a02);
          add_products(sum[r][p][1], even1, a02);
        }
        const __m256i odd0 = _mm256_srli_epi16(load_weights(w), 8), odd1 = _mm256_srli_epi16(load_weights(w + 32), 8);
#pragma GCC unroll 6
        for (int r = 0; r < kTileRows; ++r) {
          const __m256i a13 = broadcast(a[r] + at + 4);
          add_products(sum[r][p][0], odd0, a13);
          add_products(sum[r][p][1], odd1, a13);
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kTilePanels; ++p)
#pragma GCC unroll 6
      for (int r = 0; r < kTileRows; ++r) {
        int32_t* out = acc + (p * kRows + r) * 16;
        _mm256_store_si256(reinterpret_cast<__m256i*>(out), sum[r][p][0]);
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + 8), sum[r][p][1]);
      }
  }

  // Groups of kTogether panels from panel `first` on; returns the first panel that is left.
  template <int kTileRows, int kTogether>
  static INT8MOE_INLINE int groups(const GemmBlock<kPanels>& block, int first, bool fetch_next,
                                   const uint8_t* const* row, int32_t* acc) {
    constexpr int64_t kOwn = kTileRows <= 3 ? kNear : kFar;
    int p = first;
    for (; p + kTogether <= block.panels; p += kTogether)
      tile<kTileRows, kTogether>(block.panel + p,
                                 kTileRows > 2 && fetch_next ? block.to_panel_after(p, kTogether) : kOwn, row,
                                 block.depth, acc + p * kRows * 16);
    return p;
  }

  // As many panels at once as `kTogether` says, then pairs, then one by one.
  template <int kTileRows, int kTogether>
  static INT8MOE_INLINE void tiles(const GemmBlock<kPanels>& block, bool fetch_next, const uint8_t* const* row,
                                   int32_t* acc) {
    int p = 0;
    if (kTogether > 2) p = groups<kTileRows, kTogether>(block, p, fetch_next, row, acc);
    if (kTogether > 1) p = groups<kTileRows, 2>(block, p, fetch_next, row, acc);
    groups<kTileRows, 1>(block, p, fetch_next, row, acc);
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
    for (int64_t r0 = 0; r0 < block.rows;) {
      const int64_t left = block.rows - r0;
      const int rows = left < kRows ? static_cast<int>(left) : kRows;
      for (int r = 0; r < rows; ++r) row[r] = block.row(r0 + r);
      // One or two rows wait for memory whatever is done, and do so least along their own streams. More have arithmetic
      // to hide it behind: their first pass fetches the panel that this worker needs next, which found its own so.
      const bool fetch_next = r0 == 0 && rows > 2;
      switch (rows) {
        case 1: tiles<1, 4>(block, fetch_next, row, acc); break;
        case 2: tiles<2, 4>(block, fetch_next, row, acc); break;
        case 3: tiles<3, 2>(block, fetch_next, row, acc); break;
        case 4: tiles<4, 1>(block, fetch_next, row, acc); break;
        case 5: tiles<5, 1>(block, fetch_next, row, acc); break;
        default: tiles<6, 1>(block, fetch_next, row, acc); break;
      }
      epilogue(r0, rows, acc);
      r0 += rows;
    }
  }
};

}  // namespace
}  // namespace int8moe

INT8MOE_DEFINE_TIER(avx2, int8moe::Avx2Kernel)
