#include "freshet/table_served.hpp"

#include <sys/mman.h>

#include <cstring>
#include <limits>
#include <vector>

#include "freshet/table_arena.hpp"

namespace freshet {

namespace {

// Whether |a - b| <= tolerance * |b|; false if a number is not finite.
bool near(const float* a, const float* b, size_t n, float tolerance) {
  float apart = 0.0f, length = 0.0f;
  for (size_t i = 0; i < n; i++) {
    apart += (a[i] - b[i]) * (a[i] - b[i]);
    length += b[i] * b[i];
  }
  return length <= std::numeric_limits<float>::max() && apart <= tolerance * tolerance * length;
}

}  // namespace

ServedRows::ServedRows(int bits, uint32_t scalars, uint32_t width, size_t slots)
    : format_{bits, bits == 4, scalars, width - scalars}, width_(width) {
  const size_t integers = packed_bytes(format_), halves = 2 * size_t{width};
  halves_ = integers >= halves;
  row_bytes_ = static_cast<uint32_t>(halves_ ? halves : (integers + 1) / 2 * 2);  // bf16 at even addresses
  mapped_ = slots * row_bytes_;
  void* p = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    throw NoMemory(
        "no addresses are left for what serving holds of the rows; raise the process's limit (ulimit -v), or publish "
        "in fp32 or bf16 (train.publish_codec)");
  base_ = static_cast<uint8_t*>(p);
}

ServedRows::~ServedRows() { munmap(base_, mapped_); }

void ServedRows::move(uint32_t from, uint32_t to) { std::memcpy(at(to), at(from), row_bytes_); }

bool ServedRows::is_near(uint32_t slot, const float* values) const {
  static thread_local std::vector<float> held;
  held.resize(width_);
  if (halves_)
    unpack_bf16(reinterpret_cast<const uint16_t*>(at(slot)), width_, held.data());
  else
    unpack_rows(at(slot), 1, format_, held.data());
  const size_t scalars = format_.scalars;
  return near(held.data(), values, scalars, kScalarTolerance) &&
         near(held.data() + scalars, values + scalars, format_.vector, kVectorTolerance);
}

}  // namespace freshet
