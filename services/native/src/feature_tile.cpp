#include "freshet/feature_tile.hpp"

#include <algorithm>

namespace freshet {

void FeatureTile::finish_row(int64_t time_ms) {
  for (const auto& t : plan_.times) lines_[t.column].keys[lane()] = key_of_int(time_part(time_ms, t.part), t.salt);
  for (size_t l = 0; l < lists_.size(); ++l) arrays_.list_ends[l][row_] = static_cast<uint32_t>(lists_[l].size());
  ++row_;
  if (lane() == 0) spill(kTileRows);
}

void FeatureTile::undo_row() {
  for (auto& line : lines_) line.keys[lane()] = kAbsentKey;
  for (size_t l = 0; l < lists_.size(); ++l) lists_[l].resize(list_starts_[l]);
  for (uint32_t l = 0; l < plan_.served; ++l) arrays_.served[l * arrays_.stride + row_] = kMissing;
}

// Features outside the records' bytes: constants of serving, then crosses.
void FeatureTile::derive(size_t rows) {
  if (serving_) {
    for (const auto& [column, key] : plan_.constant_keys) std::fill_n(lines_[column].keys, rows, key);
  }
  for (const auto& cross : plan_.crosses) {
    parts_.resize(cross.parts.size());
    for (size_t r = 0; r < rows; ++r) {
      for (size_t k = 0; k < parts_.size(); ++k) parts_[k] = lines_[cross.parts[k]].keys[r];
      lines_[cross.column].keys[r] = key_of_cross(parts_.data(), parts_.size(), cross.seed);
    }
  }
}

// Rows [row() - rows, row()) are whole: to their columns with them.
void FeatureTile::spill(size_t rows) {
  derive(rows);
  const size_t first = row_ - rows;
  for (size_t c = 0; c < lines_.size(); ++c) {
    uint64_t* out = arrays_.columns[c] + first;
    if (rows == kTileRows) {
      std::copy_n(lines_[c].keys, kTileRows, out);
    } else {
      std::copy_n(lines_[c].keys, rows, out);
    }
    lines_[c] = Line{};
  }
}

}  // namespace freshet
