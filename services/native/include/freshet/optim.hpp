// Slots of a row and how each is stepped, by the rules of `freshet.config.spec.layout`.
//
// All arithmetic is float32, element by element, in the order that optim.cpp writes; no contraction, fixed-order sums.
// So a row's bytes after a step are equal on every instruction set, and a numpy oracle can follow them exactly.
#pragma once

#include <algorithm>
#include <bit>
#include <map>
#include <string>
#include <vector>

#include "freshet/simd.hpp"

namespace freshet {

// count: the value is count_value of the bucket of the number of steps of the row. A step whose gradient of this slot
// is above 0 does not count (HedgeLane::mark_uncounted).
enum class Rule : uint8_t { sgd, adagrad, rowwise_adagrad, adam, ftrl, rowwise_rmsprop, count };

// Steps of a row in buckets 0, 1, 2-3 (that is 1 + n from 2^b to 2^(b+1) - 1), ..., the last without an end.
inline constexpr int kCountBuckets = 12;
inline int count_bucket(float steps) {
  return std::min(static_cast<int>(std::bit_cast<uint32_t>(1.0f + steps) >> 23) - 127, kCountBuckets - 1);
}
// A bucket as a row's value. Small beside weights, so that rows sent with a scale a row (int8) keep both.
inline float count_value(int bucket) { return static_cast<float>(bucket) * (1.0f / 32.0f); }
inline int bucket_of_value(float value) {
  return std::clamp(static_cast<int>(value * 32.0f + 0.5f), 0, kCountBuckets - 1);
}

// A run of floats of a row that one optimiser steps, as in the spec's layout.
struct SlotSpec {
  uint32_t start = 0;  // first float in the row
  uint32_t width = 0;
  float init = 0.0f;  // initial values are uniform in [-init, init)
  std::string rule;   // name of a Rule
  std::map<std::string, double> parameters;
};

struct Slot {
  Rule rule = Rule::sgd;
  uint32_t start = 0;
  uint32_t width = 0;
  float init = 0.0f;
  bool half = false;  // values are bf16 in memory
  float lr = 0.0f, accumulator = 0.0f, eps = 0.0f;
  float beta1 = 0.0f, beta2 = 0.0f;  // beta2 is also the decay of row-wise RMSprop
  float beta = 0.0f, l1 = 0.0f, l2 = 0.0f;
  uint32_t state_start = 0;  // first float in the state of all slots
  uint32_t state_floats = 0;
};

// Rows follow each other in 4-byte steps, so a key need not start at a multiple of 8.
struct __attribute__((packed, aligned(4))) Header {
  uint64_t key;
  uint32_t meta;     // see Meta
  uint32_t touched;  // event time at which the row was last looked up for training or stepped, seconds since the epoch
};

namespace meta {
constexpr uint32_t kTableMask = 0xff;
constexpr uint32_t kDirtyPublish = 1u << 8;
constexpr uint32_t kDirtyFlush = 1u << 9;
constexpr uint32_t kStored =
    1u << 10;  // the row store holds the row, or will once the flush that carries it is acknowledged
constexpr uint32_t kInexact = 1u << 11;  // what serving holds of the row may be rounded; see Store::collect_inexact
constexpr uint32_t kServed = 1u << 12;   // the group's ServedRows say what serving holds of the row
constexpr uint32_t kFetched = kServed;   // of a serving store: has come from disk, and was not looked up since
constexpr uint32_t kHotShift = 13;       // two bits: uses of late, which keep the row in memory; see Store::keep_cold
constexpr uint32_t kMostHot = 3;
constexpr uint32_t kOnDisk = 1u << 15;  // a page on disk holds the row as it is
constexpr uint32_t kCountShift = 16;    // steps taken, modulo 65536: seeds the stochastic rounding of bf16 values
constexpr uint32_t kPackedMask = kTableMask | 0xffff0000u;  // the bits of a packed record
}  // namespace meta

// A row in memory. Head: header (16 bytes) | values of all slots but the last | all optimiser state. Tail: values of
// the last slot (the vector).
struct Row {
  uint8_t* head = nullptr;
  uint8_t* tail = nullptr;
  Header& header() const { return *reinterpret_cast<Header*>(head); }
};

// What a step changes: the floats of a row in a store, or of a copy. Has no initial values: a store's steps hold many.
struct Place {
  uint8_t* values;  // of all slots but the last; null: no row
  uint8_t* last;    // of the last slot
  float* state;     // of all slots
  Header* header;   // null: a copy
};

// The layout of the rows of one store group.
//
// In memory: head and tail, padded to 4 bytes. Where it costs at most 30 % more, rows take whole cache lines and the
// tail starts one, so that none is read for a neighbour's sake. Packed: head and tail without the key: meta uint32_t,
// touched uint32_t, values, state, last values; little-endian.
class RowLayout {
 public:
  RowLayout(const std::vector<SlotSpec>& specs, bool half_last, bool serving);

  uint32_t width() const { return width_; }                // S
  uint32_t state_floats() const { return state_floats_; }  // T: optimiser state of all slots
  uint32_t record_bytes() const { return record_bytes_; }  // in memory
  uint32_t packed_bytes() const { return packed_bytes_; }
  const std::vector<Slot>& slots() const { return slots_; }

  // The row that starts here.
  Row row(uint8_t* record) const { return {record, record + tail_at_}; }

  // Fill values and state of a new row; header as given.
  void create(Row row, uint64_t key, uint8_t table, uint64_t seed) const;
  // The values that `create` would give, (S,) floats.
  void initial(float* out, uint64_t key, uint8_t table, uint64_t seed) const;
  // The optimiser state that `create` would give a row of these initial values, (T,) floats.
  void initial_state(const float* values, float* out) const;
  // Copy the row's values out, (S,) floats.
  void load(Row row, float* out) const;
  // Set the row's values from (S,) floats; the state stays.
  void store(Row row, const float* values) const;
  // The row's optimiser state, (T,) floats: of all slots, in their order.
  float* state(Row row) const { return reinterpret_cast<float*>(row.head + sizeof(Header)) + head_floats_; }
  Place place(Row row) const { return {row.head + sizeof(Header), row.tail, state(row), &row.header()}; }
  // Step every slot of `n` rows by their summed gradients (n, S). stepped[i] is 0, and row i as it was, if the squared
  // length of one slot's gradient is not finite, or if there is no row.
  void step(const Place* rows, const float* gradients, size_t n, uint8_t* stepped) const {
    step_(slots_.data(), slots_.size(), rows, gradients, n, stepped);
  }

  // The same for a copy of a row: values (S,) and optimiser state (T,), all in float32 as the layout's rows must be;
  // false if it stays as it was.
  bool step_copy(float* values, float* state, const float* gradient) const {
    const Place copy{reinterpret_cast<uint8_t*>(values), reinterpret_cast<uint8_t*>(values + head_floats_), state,
                     nullptr};
    uint8_t stepped;
    step(&copy, gradient, 1, &stepped);
    return stepped != 0;
  }
  // Set the counts among `n` rows' values (n, S) from their states (n, T): a lossy codec may have rounded them.
  void restore_counts(float* values, const float* states, size_t n) const;

  void pack(Row row, uint8_t* out) const;
  // Takes all but the key; keeps none of the flags. The caller has checked the bytes with `packed_fault`.
  void unpack(Row row, const uint8_t* packed) const;
  // What is wrong with a packed record of this table, or nullptr.
  const char* packed_fault(const uint8_t* packed, uint8_t table) const;

 private:
  using Step = void (*)(const Slot* slots, size_t count, const Place* rows, const float* gradients, size_t n,
                        uint8_t* stepped);
  static Step step_of(const std::vector<Slot>& slots);

  std::vector<Slot> slots_;
  Step step_ = nullptr;
  uint32_t width_ = 0, state_floats_ = 0, head_floats_ = 0;
  uint32_t head_end_ = 0, tail_at_ = 0, tail_bytes_ = 0;
  uint32_t record_bytes_ = 0, packed_bytes_ = 0;
};

// Start of a row's stream of initial values. Value j of the row uses half of mix(stream + (j / 2 + 1) * golden): the
// low half for even j, the high one for odd; the half's upper 24 bits, less 2^23, times init / 2^23.
uint64_t initial_stream(uint64_t seed, uint8_t table, uint64_t key);

}  // namespace freshet
