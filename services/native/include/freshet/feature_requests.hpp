// From requests to a model's inputs: the context of a request is decoded, kept and pooled once, not once a candidate.
//
// A request is a served event, whose exploded array holds its candidates. Features of fields outside of the array (and
// constants, and crosses of such) have one value a request; those of fields within have one a candidate.
#pragma once

#include "freshet/feature_decode.hpp"

namespace freshet {

// Sinks of a request's program: those of FeatureSink but kServed, then these.
enum class RequestSink : uint32_t {
  kPart = 5,  // part `slot` of the impression's key: only whether it is there
  kTime = 6,  // the event's time; slot is its TimeUnit
};

struct RequestPlan {
  DecodePlan decode;     // segments are decoded and dropped
  bool explode = false;  // else a record is one candidate, and every field within it
  bool time_in_element = false;
  std::vector<uint8_t> column_in_element;  // per key column
  std::vector<uint8_t> list_in_element;    // per list
  std::vector<uint8_t> dense_in_element;   // per dense column
  std::vector<uint8_t> part_in_element;    // (K,)

  // Throws std::invalid_argument if sizes do not fit, or a value of a request would depend on its candidate.
  void check() const;
  // Throws std::invalid_argument if a sink does not fit, or is on the other side of the array than its column.
  void check(const Program& program) const;
};

// B candidates of R requests. A feature of the request has R keys (or lists) in its group, another has B.
struct DecodedRequests {
  size_t size = 0;  // B
  std::vector<DecodedGroup> groups;
  std::vector<HeapArray<uint32_t>> list_ends;  // (R,) or (B,)
  HeapArray<float> dense;                      // (B, D): each row of a request has its numbers
  std::vector<BadRecord> bad;                  // by record; nothing else is filled if there are any
};

// Decode the events of R requests. counts: (R,) candidates of each. With `explode` a record is a request, else each
// request has as many records as candidates. Throws std::invalid_argument if records and counts do not agree.
DecodedRequests decode_requests(const RequestPlan& plan, const Program& program, std::span<const uint8_t> data,
                                std::span<const int64_t> ends, std::span<const uint32_t> counts);

}  // namespace freshet
