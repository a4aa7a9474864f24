// Rank requests to predictions on one thread without leaving native code: decoded, keys made unique, rows looked up,
// scored; and how many of each request's values have no row.
//
// Letters: R requests, B candidates of all of them, L labels, F features of all store groups, group after group.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "freshet/feature_requests.hpp"
#include "freshet/hedge.hpp"
#include "freshet/plan.hpp"
#include "freshet/store.hpp"

namespace freshet {

// A step of a score in postfix order, on a stack of doubles.
struct ScoreStep {
  enum class Op : uint32_t { kNumber, kLabel, kAdd, kSubtract, kMultiply, kNegate };
  Op op;
  double number;  // of kNumber; of kLabel the label's position
};

struct ScoredRequests {
  std::vector<float> predictions;  // (B, L)
  std::vector<float> scores;       // (B,); NaN if not finite
  std::vector<int64_t>
      without_row;  // (R, F); empty if every value has a row. One that candidates share counts for each
  // Keys of requests whose rows may be on disk, each once a request: rising requests of each group after the other.
  std::vector<uint32_t> unread_requests;
  std::vector<uint8_t> unread_tables;
  std::vector<uint64_t> unread_keys;
};

// Not thread-safe: scratch is reused from call to call. It outlives neither plan nor program.
class RequestScorer {
 public:
  static constexpr size_t kDepth = 16;  // of the stack of a score

  // tables: of each feature of each group. shared: 1 for features that have one value, or list, a request. Throws
  // std::invalid_argument if the two differ in shape, or the score's steps do not leave one number.
  RequestScorer(const RequestPlan& plan, const Program& program, std::vector<std::vector<uint8_t>> tables,
                std::vector<std::vector<uint8_t>> shared, std::vector<ScoreStep> score, uint32_t buckets);

  // As decode_requests, Plan::run, Store::lookup and HedgeLane::score one after the other; `lane` is of `model`.
  // Nothing if a record cannot be read, or a bucket is not held: those functions report which. Throws
  // std::invalid_argument if store and model do not fit the groups, or as they do.
  std::optional<ScoredRequests> score(Store& store, const HedgeModel& model, HedgeLane& lane,
                                      std::span<const uint8_t> data, std::span<const int64_t> ends,
                                      std::span<const uint32_t> counts);

  size_t features() const { return features_; }

 private:
  struct Work {
    explicit Work(uint32_t buckets) : plan(buckets) {}
    Plan plan;
    std::vector<uint8_t> tables, shared;
    Buffer<float> rows;
    Buffer<uint8_t> found;
  };
  bool look_up(Store& store, const InputPlan& input, const DecodedRequests& made);
  float score_of(const float* predictions) const;
  void count_missing(size_t group, size_t first_feature, ScoredRequests& out);

  const RequestPlan& plan_;
  const Program& program_;
  std::vector<Work> work_;
  std::vector<ScoreStep> score_;
  size_t features_ = 0;
  BatchView view_;
  std::vector<uint32_t> request_ends_;
  std::vector<std::pair<uint32_t, int32_t>> unread_;  // requests and unique keys of a group
};

}  // namespace freshet
