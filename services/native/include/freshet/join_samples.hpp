// The decided samples of a joiner, and the bytes of the served events that their payloads are cut from.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "freshet/join_parts.hpp"

namespace freshet::join {

// Samples as columns, in their order on the log. The caller passes arrays of the size that `ready` returned.
struct Samples {
  std::span<int64_t> ids, times;
  std::span<uint64_t> requests;
  std::span<float> values, weights;
  std::span<uint8_t> labels;
  std::span<uint32_t> schemas;
  std::span<int64_t> ends;  // of payloads
  std::span<uint8_t> payload;
  std::span<double> aggregates;  // (n, A) row-major: the caller computes the values of numeric labels from them
};

struct Size {
  size_t samples;
  size_t bytes;
};

// A served event. Its bytes are shared by its impressions; positions are relative to its first byte.
struct ServedEvent {
  Arena::Place place{};
  uint32_t refs = 0;  // undecided (impression, label) and samples not yet taken
  uint32_t prefix = 0, suffix = 0, size = 0;
  uint32_t schema = 0;
  int64_t offset = 0;
  int64_t retained = -1;  // latest time of an impression for which a restart must read the event
  uint64_t request = 0;
};

// Served events by index, each until its last reference is released.
class ServedEvents {
 public:
  // `event` with `event.size` bytes; it has no reference yet.
  uint32_t add(const ServedEvent& event, const uint8_t* bytes) {
    const uint32_t index = events_.take();
    events_[index] = event;
    events_[index].place = arena_.put(bytes, event.size);
    return index;
  }
  void release(uint32_t index) {
    if (--events_[index].refs != 0) return;
    arena_.free(events_[index].place);
    events_.release(index);
  }
  ServedEvent& operator[](uint32_t index) { return events_[index]; }
  const ServedEvent& operator[](uint32_t index) const { return events_[index]; }
  const uint8_t* data(uint32_t index) const { return arena_.at(events_[index].place); }
  size_t bytes() const { return arena_.bytes(); }

 private:
  Pool<ServedEvent> events_;
  Arena arena_;
};

// A decided sample. Its payload is the event's prefix, the element's bytes and the event's suffix.
struct ReadySample {
  uint32_t event, element, element_begin, element_end;
  int64_t id, time;
  float value, weight;
  uint8_t label;
};

// Samples until they are taken; each holds a reference to its event.
class SampleBuffer {
 public:
  // aggregates: A, the number of aggregates of each sample.
  SampleBuffer(ServedEvents& events, size_t aggregates) : events_(events), aggregate_count_(aggregates) {}

  void push(const ReadySample& sample, const double* aggregates);
  Size ready() const { return {samples_.size(), bytes_}; }
  // Throws std::invalid_argument if an array has another size than `ready` returned.
  void take(const Samples& out);
  void discard();

 private:
  std::vector<uint32_t> order() const;

  ServedEvents& events_;
  size_t aggregate_count_;
  std::vector<ReadySample> samples_;
  std::vector<double> aggregates_;  // (samples, A)
  size_t bytes_ = 0;                // of all payloads
};

}  // namespace freshet::join
