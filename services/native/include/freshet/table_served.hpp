// What serving holds of the rows of a store group, as they were last published: a record a slot, in the integer codec
// of publishing, by which changes that are too small to be sent are known.
#pragma once

#include <cstddef>
#include <cstdint>

#include "freshet/row_codec.hpp"

namespace freshet {

// Records of slots below `slots`. Their addresses are reserved at once; pages come as they are touched, and stay.
// Nothing here locks: the caller holds the lock of the row's bucket.
class ServedRows {
 public:
  // Rows that are no shorter in integers than in bf16 are kept, as they are published, in bf16. Throws NoMemory.
  ServedRows(int bits, uint32_t scalars, uint32_t width, size_t slots);
  ~ServedRows();
  ServedRows(const ServedRows&) = delete;
  ServedRows& operator=(const ServedRows&) = delete;

  uint32_t row_bytes() const { return row_bytes_; }
  void set(uint32_t slot, const float* values) {
    if (halves_)
      pack_bf16(values, width_, reinterpret_cast<uint16_t*>(at(slot)));
    else
      pack_rows(values, 1, format_, 0, at(slot));
  }
  void move(uint32_t from, uint32_t to);
  // Whether serving's scalars are within kScalarTolerance of these values' and its vector is within kVectorTolerance,
  // as lengths of the differences beside those of the values. Values that are not finite are not near.
  bool is_near(uint32_t slot, const float* values) const;

  // Measured by `python -m bench.publish`: scalars bear twice the error of vectors.
  static constexpr float kScalarTolerance = 0.1f, kVectorTolerance = 0.05f;

 private:
  uint8_t* at(uint32_t slot) const { return base_ + static_cast<size_t>(slot) * row_bytes_; }

  RowFormat format_;
  uint32_t width_, row_bytes_;
  bool halves_;
  size_t mapped_;
  uint8_t* base_;
};

}  // namespace freshet
