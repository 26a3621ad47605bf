// Preloaded by a test: allocations by operator new fail in the thread that says so.
//
//     news_arm(n)    the nth from now on fails, and with `lasting` all that follow; 0 only counts, -1 nothing
//     news_seen()    how many there were since
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

thread_local long wanted = -1, seen = 0;
thread_local bool lasting = false;

void* given(std::size_t size, std::size_t align = alignof(std::max_align_t)) {
  if (wanted >= 0) {
    ++seen;
    if (wanted && (seen == wanted || (lasting && seen > wanted))) return nullptr;
  }
  return align > alignof(std::max_align_t) ? std::aligned_alloc(align, (size + align - 1) / align * align)
                                           : std::malloc(size ? size : 1);
}

void* or_throw(void* memory) {
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

extern "C" void news_arm(long n, int and_all_that_follow) { wanted = n, seen = 0, lasting = and_all_that_follow; }
extern "C" long news_seen() { return seen; }

void* operator new(std::size_t size) { return or_throw(given(size)); }
void* operator new[](std::size_t size) { return or_throw(given(size)); }
void* operator new(std::size_t size, std::align_val_t align) { return or_throw(given(size, static_cast<std::size_t>(align))); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return given(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
