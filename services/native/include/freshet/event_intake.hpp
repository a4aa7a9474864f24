// From bodies of requests to records of the log: events are checked, encoded and ordered by partition.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "freshet/feature_events.hpp"
#include "freshet/json_avro.hpp"

namespace freshet {

using Bodies = std::span<const std::span<const uint8_t>>;

// R bodies of N good events, over P partitions.
struct Intake {
  std::vector<int64_t> counts;      // (R,) events of each body; -1: not all of it is taken, so nothing of it is here
  std::vector<int32_t> partitions;  // (N,) of each event, in the order in which they came
  std::vector<int64_t> positions;   // (N,) of each event among those of its partition
  std::vector<int64_t> starts;      // (P + 1,) where each partition's rows start in `records` and `keys`
  BytesColumn records;              // (N,) by partition; within one, in the order in which they came
  BytesColumn keys;                 // (N,) likewise: the request's id as text
};

struct IntakeRules {
  const EventPlan& plan;
  const Program& program;  // of the records' schema, with the plan's sinks
  int32_t partitions;      // >= 1
  int64_t latest_ms;       // an event that is dated later is not taken
  int64_t max_events;      // of one body
};

// Events as JSON: an object, an array of them, or one a line, encoded by `schema`; `options.prefix` is a Confluent
// frame. keep_text: the log takes them as they came, not as Avro.
Intake intake_json(const IntakeRules& rules, const WriterSchema& schema, Bodies bodies, const JsonOptions& options,
                   bool keep_text);

// Events as framed Avro, all of schema `schema_id`: one a body, or if `lengths`, each after its length (uint32_t,
// big-endian).
Intake intake_avro(const IntakeRules& rules, uint32_t schema_id, Bodies bodies, bool lengths);

// The answer to the client of each body: {"accepted":1,"acks":[{"topic":"clicks","partition":3,"offset":1201}]};
// nothing for bodies of count -1. `topic` is a JSON string, quotes included; `firsts` (P,) each partition's first
// offset.
BytesColumn write_acks(std::string_view topic, std::span<const int64_t> counts, std::span<const int32_t> partitions,
                       std::span<const int64_t> positions, std::span<const int64_t> firsts);

}  // namespace freshet
