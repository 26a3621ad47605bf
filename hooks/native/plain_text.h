// A text whose numbers are spelled the same whatever locale the program has made C++'s: 1000, not 1.000; 0.5, not 0,5.
#pragma once
#include <locale>
#include <sstream>

namespace gemmtuned {

struct PlainText : std::ostringstream {
  PlainText() { imbue(std::locale::classic()); }
};

}  // namespace gemmtuned
