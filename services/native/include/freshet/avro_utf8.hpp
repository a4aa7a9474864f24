// Is this UTF-8? By RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF.
#pragma once

#include <cstddef>
#include <cstdint>

#include "freshet/hash.hpp"

namespace freshet {

// Length of the valid prefix; == size if all of it is UTF-8.
inline size_t utf8_prefix(const uint8_t* p, size_t size) {
  size_t i = 0;
  while (i < size) {
    if (size - i >= 8 && !(read_u64(p + i) & 0x8080808080808080ull)) {
      i += 8;
      continue;
    }
    const uint8_t lead = p[i];
    if (lead < 0x80) {
      ++i;
      continue;
    }
    const size_t more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
    if (lead < 0xC2 || lead > 0xF4 || size - i <= more) return i;
    const uint8_t second = p[i + 1];
    const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (second < low || second > high) return i;
    for (size_t k = 2; k <= more; ++k) {
      if ((p[i + k] & 0xC0) != 0x80) return i;
    }
    i += more + 1;
  }
  return i;
}

}  // namespace freshet
