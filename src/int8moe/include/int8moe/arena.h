// One block of scratch memory, cut into the arrays of a chunk.
#ifndef INT8MOE_ARENA_H
#define INT8MOE_ARENA_H

#include <stdint.h>

#include "panels.h"

namespace int8moe {
namespace {

// Hands out 64-byte aligned pieces of one block; with a null base it only measures.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)), used_(0) {}
  template <class T>
  T* take(int64_t count) {
    char* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(piece);
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_;
};

}  // namespace
}  // namespace int8moe
#endif
