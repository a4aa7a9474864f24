// A rank request as its client wrote it: its event, and texts of its parts. The body is parsed once and its parts are
// copied unchanged; none of them becomes a Python object.
//
// Letters: C candidates, K items of the answer, L labels.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "freshet/avro_write.hpp"
#include "freshet/bytes_column.hpp"
#include "freshet/feature_events.hpp"
#include "freshet/json_avro.hpp"

namespace freshet {

// Rules of a spec whose candidates are an array at the top of the served event, beside the request's id and time.
struct RankRules {
  std::string candidates, id, time;  // names of those fields in the event
  std::string served;                // the field of an item for the served score and version
  std::vector<std::string> places;   // fields of an item that take its place in the answer, unless it has them; <= 64
  std::vector<std::string> labels;   // as JSON, quotes included
  size_t max_candidates = 0;
};

// What the log takes of a request that is answered: the schema of served events, in which fields that take their place
// in the answer have a default, and how the joiner reads them. Times lie from 0 to `latest_ms`.
struct LoggedRules {
  const WriterSchema& schema;
  const EventPlan& plan;
  const Program& program;
  int64_t latest_ms;
};

// The answer's items, best first: columns of K rows, but for `scores` (C,) and `predictions` (C, L).
struct RankOrder {
  std::span<const int64_t> indices;
  std::span<const float> scores, predictions, propensity;
};

// The `k` candidates with the highest scores, best first, ties in the order of the request; not-a-number is
// last.
std::vector<int64_t> best(std::span<const float> scores, size_t k);

class RankText {
 public:
  // Reads the body of a rank request; `new_id` and `now`, as JSON, are its event's id and time if it has none. Returns
  // nothing for a body that the fast path does not handle: it is malformed, requests explanations, gives an id or any
  // name twice, writes the names above with escapes, has a number that no double holds, or writes its context or a
  // candidate over several lines (the texts go to logs that are read line by line). The caller then reads the body
  // member by member. With `logged`, the log must accept the event of a request that is no dry run.
  static std::optional<RankText> read(const RankRules& rules, const WriterSchema& request, std::string body,
                                      std::string_view new_id, std::string_view now,
                                      const LoggedRules* logged = nullptr);

  BytesColumn record;  // (1,) the event as Avro of `request`
  std::string id;      // of the request, as JSON
  size_t candidates = 0, k = 0;
  size_t logged_bytes = 0;  // of the event as the log's Avro, without `served` and positions; 0 without `logged`
  bool dry_run = false;

  // [{"index", "score", "predictions", "propensity"}, ...]. What is not a number is null. Throws std::invalid_argument
  // if columns do not fit the request.
  std::string items(const RankRules& rules, const RankOrder& order) const;
  // The event on one line, with the items in their order, each with its served score, or null for an item whose score
  // or prediction is not finite. Throws as `items`.
  std::string served(const RankRules& rules, const RankOrder& order, int64_t version, bool explored) const;

 private:
  struct Candidate {
    uint32_t start, size;  // of its members' text in the body
    uint64_t has;          // bit p: it has a field `places[p]`
  };
  // The places of the event's parts in the parsed body, and the added parts.
  struct Parts {
    uint32_t context = kNoNode, candidates = kNoNode;
    bool adds_id = false, adds_time = false;
  };
  bool read_members(JsonParser& parser, const RankRules& rules, std::string_view new_id, std::string_view now,
                    Parts& parts);
  void check(const RankRules& rules, const RankOrder& order) const;

  std::string body_, context_;  // context_: members of the event but for the candidates
  std::vector<Candidate> of_;
};

}  // namespace freshet
