// Scratch memory of a call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rudnn::cpu {

// Uninitialised memory in huge pages. One block of moderate size outlives its call and serves the next, since mapping
// fresh memory can cost as much as the work.
class Workspace {
 public:
  explicit Workspace(size_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // The next `count` elements, aligned to a cache line. All calls together must stay within the size, for which
  // size_of gives what each takes.
  template <class T>
  T* take(int64_t count) {
    void* data = next_;
    next_ += size_of<T>(count);
    return static_cast<T*>(data);
  }

  template <class T>
  static size_t size_of(int64_t count) {
    constexpr size_t kLine = 64;
    return (static_cast<size_t>(count) * sizeof(T) + kLine - 1) / kLine * kLine;
  }

 private:
  void* block_ = nullptr;
  char* next_ = nullptr;
};

}  // namespace rudnn::cpu
