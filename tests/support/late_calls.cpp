// Calls that begin and end while one probation follows the other: a page that nobody writes to holds a count of 0.
//
//     late_calls FOLDER GENERATIONS
//
// Prints how many of the pages had another count while all calls stood still; and when there are no more calls, whether the
// next page gets the address of the last one.
#include "probation_page.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

using namespace gemmtuned;

int main(int, char** argv) {
  const std::string folder = argv[1], base = folder.substr(0, folder.rfind('/'));
  const auto generations = static_cast<uint64_t>(atoi(argv[2]));
  std::atomic<bool> stop{false}, still{false};
  std::atomic<int> standing{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i)
    callers.emplace_back([&] {
      while (!stop) {
        if (still) {
          ++standing;
          while (still) std::this_thread::yield();
          --standing;
        }
        {
          const HeldPage page(HeldPage::MADE);
          if (!page) continue;
          usleep(100);  // the processor is another's: the next probation may begin now
          page->going_on.fetch_add(1);
          usleep(10);  // the call: or now
          page->going_on.fetch_sub(1);
        }
        usleep(50);
      }
    });
  int wrong = 0;
  const auto begun = [&](uint64_t generation) {
    Probation::get().begin(base.c_str(), folder.c_str(), generation, "{\"start\": ", 0);
    ProbationPage* const page = Probation::get().page();
    if (!page) exit(1);
    return page;
  };
  for (uint64_t generation = 1; generation <= generations; ++generation) {
    const ProbationPage* const page = begun(generation);
    still = true;
    while (standing != 3) std::this_thread::yield();
    wrong += page->going_on.load() != 0;
    still = false;
    while (standing != 0) std::this_thread::yield();
    usleep(100);
    Probation::get().end(false);
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
  const ProbationPage* const last = begun(generations + 1);
  const bool same = begun(generations + 2) == last;
  Probation::get().end(false);
  printf("%d %d\n", wrong, same);
}
