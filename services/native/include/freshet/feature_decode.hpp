// From Avro records to a model's inputs: keys per store group, list ends, dense numbers, in one pass over the bytes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "freshet/avro_program.hpp"

namespace freshet {

// An array that Python can take over without a copy.
template <class T>
struct HeapArray {
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T[], Free> data;
  size_t size = 0;

  static HeapArray zeroed(size_t n) { return of(std::calloc(n ? n : 1, sizeof(T)), n); }
  // No element may be read before it is written.
  static HeapArray unwritten(size_t n) {
    return of(n > SIZE_MAX / sizeof(T) ? nullptr : std::malloc(n ? n * sizeof(T) : 1), n);
  }
  static HeapArray filled(size_t n, T value) {
    HeapArray b = unwritten(n);
    for (size_t i = 0; i < n; ++i) b.data[i] = value;
    return b;
  }
  T* begin() { return data.get(); }

 private:
  static HeapArray of(void* p, size_t n) {
    if (!p) throw std::bad_alloc();
    return {std::unique_ptr<T[], Free>(static_cast<T*>(p)), n};
  }
};

// Sinks of a feature program. `slot` is a key column, a list, a dense column, or unused.
enum class FeatureSink : uint32_t {
  kKey,     // one key; an enum's keys are in the words
  kList,    // one more key of the list
  kDense,   // a number
  kBucket,  // the words are rising edges (doubles); the key is that of the number of edges <= value
  kServed,  // the next of the predictions logged at serving
};

enum class TimePart : uint32_t { kHour, kWeekday, kHourOfWeek };  // UTC; Monday is 0

// What the columns of a decoded batch are, whatever schema the records have.
struct DecodePlan {
  struct Entry {
    bool list;
    uint32_t index;  // of a key column or of a list
  };
  struct Time {
    uint32_t column;
    TimePart part;
    uint64_t salt;
  };
  struct Cross {
    uint32_t column;
    uint64_t seed;
    std::vector<uint32_t> parts;  // key columns, made before this one
  };
  std::vector<std::vector<Entry>> groups;  // features of each store group, in its order
  std::vector<uint32_t> segments;          // key columns (unsalted), beside the groups'
  uint32_t columns = 0;
  std::vector<uint32_t> list_max;
  std::vector<uint8_t> log1p;  // (D,)
  uint32_t served = 0;         // labels
  std::vector<Time> times;
  std::vector<Cross> crosses;
  std::vector<std::pair<uint32_t, uint64_t>> constant_keys;  // at serving: (key column, key)
  std::vector<std::pair<uint32_t, float>> constant_dense;    // at serving: (dense column, value)

  // Throws std::invalid_argument if an index is out of range.
  void check() const;
  void check(const Program& program) const;
};

struct DecodedGroup {
  HeapArray<uint64_t> keys;
  std::vector<uint32_t> feature_starts;
  std::vector<int64_t> lists;  // per feature: index into DecodedBatch::list_ends, or -1
};

struct BadRecord {
  int64_t index;
  int64_t program;
  Failure failure;
};

struct DecodedBatch {
  size_t size = 0;  // B: good records
  std::vector<DecodedGroup> groups;
  std::vector<HeapArray<uint32_t>> list_ends;
  HeapArray<float> dense;                     // (B, D)
  std::vector<HeapArray<uint64_t>> segments;  // (B,)
  HeapArray<float> served;                    // (labels, B)
  std::vector<BadRecord> bad;
};

// Decode N records. `which` names the program of each record; empty: all are of programs[0].
// times_ms: (N,) event time of each record. serving: constants replace fields that are unknown then.
DecodedBatch decode_features(const DecodePlan& plan, std::span<const Program* const> programs,
                             std::span<const int32_t> which, std::span<const uint8_t> data,
                             std::span<const int64_t> ends, std::span<const int64_t> times_ms, bool serving);

// sign(x) * log(1 + |x|), in place where mask (D,) is set; values (B, D). Equal bits on every instruction set.
void log1p_columns(float* values, size_t rows, std::span<const uint8_t> mask);

int64_t time_part(int64_t time_ms, TimePart part);

}  // namespace freshet
