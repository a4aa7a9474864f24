// Where a record's values go: a tile of a few rows, which is spilled to the batch's columns a cache line at a time.
//
// Columns of a batch lie a power of two apart as a rule, so that writing a row's keys straight to them would have all
// of them compete for the same few lines of the cache.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "freshet/feature_decode.hpp"
#include "freshet/hash.hpp"

namespace freshet {

inline constexpr size_t kTileRows = 8;  // keys of a cache line
inline constexpr float kMissing = std::numeric_limits<float>::quiet_NaN();

// The arrays of a batch of up to `stride` records, in which rows are yet to be written.
struct FeatureArrays {
  std::vector<uint64_t*> columns;  // per key column: (stride,)
  float* dense = nullptr;          // (stride, D)
  float* served = nullptr;         // (labels, stride), missing where nothing is written
  std::vector<uint32_t*> list_ends;
  size_t stride = 0;
};

// A handler of the walker (avro_walk.hpp): writes into row `row()`, the first that is not finished.
class FeatureTile {
 public:
  static constexpr bool kExplodes = false;

  FeatureTile(const DecodePlan& plan, FeatureArrays arrays, bool serving)
      : plan_(plan),
        arrays_(std::move(arrays)),
        serving_(serving),
        lines_(plan.columns),
        lists_(plan.list_max.size()),
        list_starts_(plan.list_max.size()) {}

  void begin_row(const Program& program) {
    words_ = program.words().data();
    predictions_ = 0;
    for (size_t l = 0; l < lists_.size(); ++l) list_starts_[l] = lists_[l].size();
    for (size_t d = 0; d < plan_.log1p.size(); ++d) dense()[d] = kMissing;
  }
  // The record was good; the next begins another row.
  void finish_row(int64_t time_ms);
  // The record is invalid, or is read again: discard its values.
  void undo_row();
  // After the last row: write the rest of the tile.
  void finish() {
    if (lane()) spill(lane());
  }

  size_t row() const { return row_; }
  const std::vector<uint64_t>& list(size_t l) const { return lists_[l]; }

  // The keys of the current row, that of column c at keys()[c * kTileRows], and its dense numbers.
  uint64_t* keys() { return lines_.empty() ? nullptr : lines_.data()->keys + lane(); }
  float* dense() { return arrays_.dense + row_ * plan_.log1p.size(); }

  void on_int(const Sink& s, int64_t v) {
    is_key(s) ? key(s, key_of_int(v, s.salt)) : number(s, static_cast<double>(v));
  }
  void on_double(const Sink& s, double v) { is_key(s) ? key(s, key_of_double(v, s.salt)) : number(s, v); }
  void on_bytes(const Sink& s, const uint8_t* p, size_t n) {
    if (is_key(s)) key(s, key_of_bytes(p, n, s.salt));
  }
  void on_enum(const Sink& s, uint32_t symbol) {
    if (is_key(s) && symbol < s.words_size) key(s, words_[s.words_begin + symbol]);
  }

  static float finite(float f) { return std::isfinite(f) ? f : kMissing; }

 private:
  struct alignas(64) Line {
    uint64_t keys[kTileRows] = {};
  };

  static bool is_key(const Sink& s) { return s.kind <= static_cast<uint32_t>(FeatureSink::kList); }

  size_t lane() const { return row_ % kTileRows; }

  void number(const Sink& s, double v) {
    if (static_cast<FeatureSink>(s.kind) == FeatureSink::kDense) {
      dense()[s.slot] = finite(static_cast<float>(v));
    } else if (static_cast<FeatureSink>(s.kind) == FeatureSink::kBucket) {
      if (v != v) return;
      int64_t edges = 0;
      for (uint32_t i = 0; i < s.words_size; ++i) edges += std::bit_cast<double>(words_[s.words_begin + i]) <= v;
      lines_[s.slot].keys[lane()] = key_of_int(edges, s.salt);
    } else if (predictions_ < plan_.served) {
      arrays_.served[predictions_++ * arrays_.stride + row_] = static_cast<float>(v);
    }
  }

  void key(const Sink& s, uint64_t k) {
    if (static_cast<FeatureSink>(s.kind) == FeatureSink::kKey) {
      lines_[s.slot].keys[lane()] = k;
    } else if (k != kAbsentKey && lists_[s.slot].size() - list_starts_[s.slot] < plan_.list_max[s.slot]) {
      lists_[s.slot].push_back(k);
    }
  }

  void derive(size_t rows);
  void spill(size_t rows);

  const DecodePlan& plan_;
  FeatureArrays arrays_;
  bool serving_;
  size_t row_ = 0;
  const uint64_t* words_ = nullptr;           // of the program at work
  std::vector<Line> lines_;                   // per key column; rows not yet begun hold kAbsentKey
  std::vector<std::vector<uint64_t>> lists_;  // of the whole batch
  std::vector<size_t> list_starts_;           // of this record's elements
  uint32_t predictions_ = 0;                  // seen in this record
  std::vector<uint64_t> parts_;               // of a cross
};

}  // namespace freshet
