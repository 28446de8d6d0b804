// Scratch memory that is kept between calls: a free list of a few blocks behind a spin lock.
//
// Used by the dispatcher unit only. In the steady state a call takes its block from the list and puts it back:
// nothing is allocated. What the list keeps is bounded; int8moe_release_scratch() frees it.
#ifndef INT8MOE_SCRATCH_H
#define INT8MOE_SCRATCH_H

#include <stdint.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace int8moe {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int kKeptBlocks = 16;

// The header fills the 64 bytes before the memory that a caller sees.
struct alignas(64) Block {
  int64_t bytes;
};

class Scratch {
 public:
  void* acquire(int64_t bytes) {
    lock();
    int best = -1;
    for (int i = 0; i < count_; ++i)
      if (kept_[i]->bytes >= bytes && (best < 0 || kept_[i]->bytes < kept_[best]->bytes)) best = i;
    Block* found = nullptr;
    Block* outgrown = nullptr;
    if (best >= 0) {
      found = take(best);
    } else if (count_ > 0) {
      outgrown = take(count_ - 1);  // too small for today's calls: replace it rather than collect sizes
    }
    unlock();
    free(outgrown);
    if (found == nullptr) found = allocate(bytes);
    return found == nullptr ? nullptr : found + 1;
  }

  void release(void* memory, int64_t limit) {
    Block* block = static_cast<Block*>(memory) - 1;
    lock();
    // One block is always kept, however large, or the steady state of large calls would allocate.
    const bool keep = count_ < kKeptBlocks && (count_ == 0 || total_ + block->bytes <= limit);
    if (keep) {
      kept_[count_++] = block;
      total_ += block->bytes;
    }
    unlock();
    if (!keep) free(block);
  }

  void clear() {
    for (;;) {
      lock();
      Block* block = count_ > 0 ? take(count_ - 1) : nullptr;
      unlock();
      if (block == nullptr) return;
      free(block);
    }
  }

  int64_t bytes() {
    lock();
    const int64_t total = total_;
    unlock();
    return total;
  }

  // In the child of a fork the thread that held the lock may be gone; the list itself may be half changed.
  void forget() {
    count_ = 0;
    total_ = 0;
    __atomic_clear(&locked_, __ATOMIC_RELEASE);
  }

 private:
  Block* take(int index) {
    Block* block = kept_[index];
    kept_[index] = kept_[--count_];
    total_ -= block->bytes;
    return block;
  }

  static Block* allocate(int64_t bytes) {
    const int64_t unit = bytes >= 4 * kMiB ? 2 * kMiB : 4096;  // whole huge pages for large blocks
    int64_t size = bytes + bytes / 8 + static_cast<int64_t>(sizeof(Block));
    size = (size + unit - 1) / unit * unit;
    void* memory = nullptr;
    if (posix_memalign(&memory, static_cast<size_t>(unit), static_cast<size_t>(size)) != 0) return nullptr;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (unit == 2 * kMiB) (void)madvise(memory, static_cast<size_t>(size), MADV_HUGEPAGE);
#endif
    Block* block = static_cast<Block*>(memory);
    block->bytes = size - static_cast<int64_t>(sizeof(Block));
    return block;
  }

  void lock() {
    while (__atomic_test_and_set(&locked_, __ATOMIC_ACQUIRE)) {
    }
  }
  void unlock() { __atomic_clear(&locked_, __ATOMIC_RELEASE); }

  bool locked_;
  int count_;
  int64_t total_;
  Block* kept_[kKeptBlocks];
};

}  // namespace
}  // namespace int8moe
#endif
