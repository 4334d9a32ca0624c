// Working memory of one thread, kept for its next task.
#pragma once

#include <cstdlib>
#include <cstring>

namespace headstart {

class Scratch {
 public:
  ~Scratch() { free(memory_); }

  // Room for that many floats, aligned for vectors; what it holds is left from before, and finite.
  float* at_least(size_t floats) {
    if (floats > size_) {
      free(memory_);
      void* fresh = nullptr;
      if (posix_memalign(&fresh, 64, floats * sizeof(float))) abort();
      memory_ = static_cast<float*>(fresh);
      memset(memory_, 0, floats * sizeof(float));
      size_ = floats;
    }
    return memory_;
  }

 private:
  float* memory_ = nullptr;
  size_t size_ = 0;
};

extern thread_local Scratch scratch;

}  // namespace headstart
