// Blocks of a matrix whose elements are groups of kDepth bytes, transposed in 16-byte vectors: the inner loop of packing
// and, a transposition being its own inverse, of unpacking.
#ifndef INT8MOE_TRANSPOSE_H
#define INT8MOE_TRANSPOSE_H

#include <stdint.h>

namespace int8moe {
namespace {

typedef uint32_t Words __attribute__((vector_size(16)));
typedef uint64_t Pairs __attribute__((vector_size(16)));

#if defined(__clang__)
inline Words low_words(Words a, Words b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline Words high_words(Words a, Words b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
inline Pairs low_pairs(Pairs a, Pairs b) { return __builtin_shufflevector(a, b, 0, 2); }
inline Pairs high_pairs(Pairs a, Pairs b) { return __builtin_shufflevector(a, b, 1, 3); }
#else
inline Words low_words(Words a, Words b) { return __builtin_shuffle(a, b, Words{0, 4, 1, 5}); }
inline Words high_words(Words a, Words b) { return __builtin_shuffle(a, b, Words{2, 6, 3, 7}); }
inline Pairs low_pairs(Pairs a, Pairs b) { return __builtin_shuffle(a, b, Pairs{0, 2}); }
inline Pairs high_pairs(Pairs a, Pairs b) { return __builtin_shuffle(a, b, Pairs{1, 3}); }
#endif

// kSide x kSide groups: row i is read at in + i * in_stride and group j of it becomes group i of the row written at
// out + j * out_stride. kOffset is flipped into every byte (0, or 128: w + 128 as unsigned is w with its top bit flipped).
template <int kDepth, int kOffset>
struct Transpose {
  static_assert(kDepth == 4 || kDepth == 8, "groups of half a vector or a quarter");
  static constexpr int kSide = 16 / kDepth;

  static inline void block(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride) {
    if (kDepth == 8) {
      const Pairs a = load(in), b = load(in + in_stride);
      store(out, low_pairs(a, b));
      store(out + out_stride, high_pairs(a, b));
    } else {
      const Words a = (Words)load(in), b = (Words)load(in + in_stride);
      const Words c = (Words)load(in + 2 * in_stride), d = (Words)load(in + 3 * in_stride);
      const Pairs ab0 = (Pairs)low_words(a, b), ab2 = (Pairs)high_words(a, b);
      const Pairs cd0 = (Pairs)low_words(c, d), cd2 = (Pairs)high_words(c, d);
      store(out, low_pairs(ab0, cd0));
      store(out + out_stride, high_pairs(ab0, cd0));
      store(out + 2 * out_stride, low_pairs(ab2, cd2));
      store(out + 3 * out_stride, high_pairs(ab2, cd2));
    }
  }

 private:
  static inline Pairs load(const uint8_t* p) {
    Pairs v;
    __builtin_memcpy(&v, p, 16);
    return v ^ (kOffset * 0x0101010101010101u);
  }
  static inline void store(uint8_t* p, Pairs v) { __builtin_memcpy(p, &v, 16); }
};

}  // namespace
}  // namespace int8moe
#endif
