// From event records to the inputs of the joiner: identities, times, spans to splice, and columns of conditions.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "freshet/avro_program.hpp"
#include "freshet/bytes_column.hpp"
#include "freshet/hash.hpp"

namespace freshet {

// Sinks of an event program.
enum class EventSink : uint32_t {
  kPart,    // part `slot` of the impression's key
  kTime,    // the event's time; slot is its unit
  kId,      // the event's id
  kNumber,  // column `slot`, a number
  kHash,    // column `slot`, the unsalted key of a string; an enum's are in the words
  kInt,     // column `slot`, an int or long, exact: its 64 bits stand in the hashes
};

enum class TimeUnit : uint32_t { kSeconds, kMillis, kMicros, kIso, kNanos, kDays };

struct EventPlan {
  bool explode = false;  // impressions are the elements of an array
  bool has_id = false;   // else the record's content identifies the event
  bool time_in_element = false;
  bool id_in_element = false;
  std::vector<uint8_t> part_in_element;    // (K,)
  std::vector<uint8_t> column_is_hash;     // (C,) a hash, or an int: not a double
  std::vector<uint8_t> column_in_element;  // (C,)

  // Throws std::invalid_argument if a sink of the program does not fit.
  void check(const Program& program) const;
};

struct EventColumn {
  std::vector<double> numbers;
  std::vector<uint64_t> hashes;
  std::vector<uint8_t> null;
};

// M impressions of E good events, in order.
struct ExtractedEvents {
  std::vector<int64_t> events;                // (E,) index of the record
  BytesColumn request_keys;                   // (E,) text of the key's first part
  std::vector<int64_t> event_index;           // (M,) index of the record
  std::vector<Hash128> impressions;           // (M,)
  std::vector<uint64_t> requests;             // (M,)
  std::vector<Hash128> ids;                   // (M,)
  std::vector<int64_t> times_ms;              // (M,)
  std::vector<std::array<int64_t, 6>> spans;  // (M,) prefix, element, suffix: start and end each, in data
  std::vector<EventColumn> columns;
  struct Bad {
    int64_t index;
    Failure failure;
  };
  std::vector<Bad> bad;
};

// framed: each record starts with a Confluent frame of 5 bytes, which is not part of its spans.
ExtractedEvents extract_events(const EventPlan& plan, const Program& program, std::span<const uint8_t> data,
                               std::span<const int64_t> ends, bool framed);

// Whether extract_events would take the (1,) record, with all its times from 0 to `latest_ms`. Nothing is hashed or
// kept, so it costs a fraction. False, too, for keys of more than 64 parts.
bool is_readable_event(const EventPlan& plan, const Program& program, std::span<const uint8_t> record,
                       int64_t latest_ms);

// Milliseconds since the epoch of an ISO 8601 / RFC 3339 time: "2026-11-21", "2026-11-21T13:10:33.5Z", "... +01:00",
// a blank for the T; without a zone it is UTC. False if it is none, or not in the years 1 to 9999.
bool parse_iso_time(std::string_view text, int64_t& time_ms);

// Concatenate spans of data: one string per row of (M, 6) starts and ends. Throws if a span is out of range.
BytesColumn splice(std::span<const uint8_t> data, std::span<const int64_t> spans);

}  // namespace freshet
