// Whose fault it is when a route fails. Blame needs evidence.
//
// A shortage of memory, a fault that an earlier kernel of the program left on the device, a capture that the program broke
// or a stream that it destroyed say nothing about the route: it declines, stock torch runs the call, and nothing is reported. Anything
// else switches the route off in this process and is reported; the daemon runs the candidate itself before it withdraws it.
#pragma once
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <new>

#include "routes.h"

namespace gemmtuned {

// The route cannot be run now, for a reason that is not its own. Costs little to throw: it may be thrown at every call.
struct Declined : std::exception {
  explicit Declined(const char* why) : why(why) {}
  const char* what() const noexcept override { return why; }
  const char* why;  // a literal
};

inline bool names(const char* text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    if (std::strstr(text, part)) return true;
  return false;
}

// Allocators have their own words for it, and most of them throw a plain c10::Error or std::runtime_error.
inline bool tells_of_shortage(const char* text) {
  return names(text, {"DefaultCPUAllocator", "not enough memory", "can't allocate memory", "Cannot allocate memory",
                      "out of memory", "could not create a memory object", "bad_alloc", "ENOMEM"});
}

// Whether this much memory is to be had from the system: an error whose words say nothing is no evidence while it is not.
inline bool is_there(size_t bytes) {
  void* volatile probe = std::malloc(bytes);  // not touched: costs nothing but addresses
  std::free(probe);
  return probe != nullptr;
}

// In a catch block: blames the route, or does not. `bytes`: more than the call can have needed, in host memory; 0 where its
// memory is on a device. Every thread looks up again after a failure: what failed is a miss from now on.
inline bool blame(Route& route, size_t bytes) {
  const auto fail = [&](const char* why) {
    if (tells_of_shortage(why) || (bytes && !is_there(bytes))) return false;
    route.fail(FAILED, why);
    return true;
  };
  try {
    throw;
  } catch (const Declined&) {
    return false;
  } catch (const std::bad_alloc&) {
    return false;
  } catch (const c10::OutOfMemoryError&) {
    return false;
  } catch (const c10::NotImplementedError&) {  // a library that does not take these strides
    return false;
  } catch (const c10::Error& err) {
    // torch's own CUDA calls around ours fail like this, after a fault of an earlier kernel; ours go through the driver
    if (names(err.what_without_backtrace(), {"CUDA error", "CUDA driver error", "HIP error"})) return false;
    return fail(err.what_without_backtrace());
  } catch (const std::exception& err) {
    return fail(err.what());
  } catch (...) {
    return fail("unknown exception");
  }
}

}  // namespace gemmtuned
