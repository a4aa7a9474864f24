// JSON events to Avro records, strictly by the schema, with errors that name the field.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "freshet/avro_write.hpp"
#include "freshet/bytes_column.hpp"
#include "freshet/json_parse.hpp"

namespace freshet {

// Why an event was refused. The numbers are those of freshet.features.transcode.
enum class JsonWhy : uint8_t {
  kNone,
  kSyntax,     // no JSON; `expected` is the expected text
  kType,       // a value of another type than the schema's
  kRange,      // a number that does not fit
  kSymbol,     // no symbol of the enum
  kSize,       // another length than the fixed's
  kMissing,    // a field that is not there, without default
  kUnknown,    // a field that the schema does not have
  kDuplicate,  // a field twice
  kMore,       // something after the event
};

struct JsonFailure {
  int64_t index = 0;  // of the event
  JsonWhy why = JsonWhy::kNone;
  uint32_t node = 0;          // of the schema
  size_t position = 0;        // in the event's text
  std::string path;           // "items[3].id"
  std::string found;          // the text of the JSON, truncated
  const char* expected = "";  // for kSyntax
};

struct Transcoded {
  BytesColumn records;          // Avro of the good events
  std::vector<int64_t> events;  // index of each among all events
  std::vector<JsonFailure> bad;
  std::vector<int64_t> begins, ends;  // (total,) the place of each event's text in the body, or in its value
  int64_t total = 0;                  // events seen
};

struct JsonOptions {
  bool ignore_unknown = false;      // fields that the schema does not have
  std::span<const uint8_t> prefix;  // put before each record: a Confluent frame, or nothing
};

// Each value of the column is one event. A byte-order mark at its beginning is skipped.
Transcoded transcode_each(const WriterSchema& schema, std::span<const uint8_t> data, std::span<const int64_t> ends,
                          const JsonOptions& options);

// The events of a body: objects one after the other, with or without white space between, and arrays of objects. A
// byte-order mark at the beginning is skipped. What is wrong is refused with its exact bytes, the others are taken:
// - an element of an array ends at the comma or bracket that follows from its quotes and brackets;
// - an object ends at the brace that follows from them, but not beyond the next line that begins with a brace;
// - any other value, or one with further text on its line, is refused with its line;
// - if quotes and brackets give no end, everything up to the next line that begins with a brace is refused as one.
// Stops after `max_events` and one more.
Transcoded transcode_body(const WriterSchema& schema, std::span<const uint8_t> body, const JsonOptions& options,
                          int64_t max_events);

inline constexpr uint32_t kNoNode = UINT32_MAX;

// A member of an event that is composed of parsed pieces.
struct JsonMember {
  std::string_view name;     // of a field at the top of the schema
  const JsonParser* parser;  // that has parsed the value
  uint32_t node;             // the value
};

// Append one event to a column: the members of a parsed object (kNoNode: of none) and `more`, fields that the schema
// does not have left out. False if it does not fit the schema, or has a name twice; `record` then holds rubbish.
bool transcode_composed(const WriterSchema& schema, const JsonParser& parser, uint32_t object,
                        std::span<const JsonMember> more, BytesColumn& record);

// Events of several bodies, of each body all or none.
struct TranscodedBodies {
  BytesColumn records;
  std::vector<std::span<const uint8_t>> texts;  // of each record: its text in its body
  std::vector<int64_t> counts;                  // events of each body; -1 if not all of it fits, or it holds none
};

// As `transcode_body` of each, for bodies whose events are all valid: a body of 0 events, of more than
// `max_events`, or with any event that is refused adds nothing.
TranscodedBodies transcode_bodies(const WriterSchema& schema, std::span<const std::span<const uint8_t>> bodies,
                                  const JsonOptions& options, int64_t max_events);

}  // namespace freshet
