// The floating-point control word of the calling thread: round to nearest, no flush to zero; put back afterwards.
#ifndef INT8MOE_FP_CONTROL_H
#define INT8MOE_FP_CONTROL_H

#include <stdint.h>

namespace int8moe {
namespace {

#if defined(__x86_64__)
inline uint64_t fp_control() { return __builtin_ia32_stmxcsr(); }
inline void set_fp_control(uint64_t word) { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(word)); }
constexpr uint64_t kIeeeControl = 0x1F80;  // MXCSR: all exceptions masked, nearest, FTZ and DAZ clear
#elif defined(__aarch64__)
inline uint64_t fp_control() {
  uint64_t word;
  __asm__ volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}
inline void set_fp_control(uint64_t word) { __asm__ volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
constexpr uint64_t kIeeeControl = 0;  // FPCR: nearest, FZ and FZ16 clear, no traps
#elif defined(__s390x__)
inline uint64_t fp_control() {
  uint32_t word;
  __asm__ volatile("efpc %0" : "=r"(word));
  return word;
}
inline void set_fp_control(uint64_t word) {
  __asm__ volatile("sfpc %0" : : "r"(static_cast<uint32_t>(word)) : "memory");
}
constexpr uint64_t kIeeeControl = 0;  // FPC: nearest, no traps; this machine has no flush to zero
#else
inline uint64_t fp_control() { return 0; }  // a machine whose C default is IEEE
inline void set_fp_control(uint64_t) {}
constexpr uint64_t kIeeeControl = 0;
#endif

// Float work must sit behind a call that is not inlined, so that none of it moves outside the guard.
class IeeeGuard {
 public:
  IeeeGuard() : saved_(fp_control()) {
    if (saved_ != kIeeeControl) set_fp_control(kIeeeControl);
  }
  ~IeeeGuard() {
    if (saved_ != kIeeeControl) set_fp_control(saved_);
  }
  IeeeGuard(const IeeeGuard&) = delete;
  IeeeGuard& operator=(const IeeeGuard&) = delete;

 private:
  const uint64_t saved_;
};

}  // namespace
}  // namespace int8moe
#endif
