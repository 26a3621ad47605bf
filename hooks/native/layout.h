// How the structures that Python mirrors lie in memory, by the names of their members: a swap of two of one size shows.
#pragma once
#include <cstddef>
#include <string>

#define GEMMTUNED_FIELD(Struct, member) {#Struct "." #member, offsetof(Struct, member), sizeof(Struct::member)}

namespace gemmtuned {

struct FieldLayout {
  const char* name;
  size_t offset, size;
};

template <size_t N>
std::string layout_text(const FieldLayout (&fields)[N]) {
  std::string text;
  for (const FieldLayout& field : fields)
    text += std::string(field.name) + ":" + std::to_string(field.offset) + ":" + std::to_string(field.size) + "\n";
  return text;
}

}  // namespace gemmtuned
