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
  enum class Op : std::uint32_t { kNumber, kLabel, kAdd, kSubtract, kMultiply, kNegate };
  Op op;
  double number;  // of kNumber; of kLabel the label's position
};

struct ScoredRequests {
  std::vector<float> predictions;  // (B, L)
  std::vector<float> scores;       // (B,); NaN for what is not finite
  std::vector<i64> without_row;    // (R, F); empty if every value has a row. One that candidates share counts for each
};

// Not thread-safe: scratch is reused from call to call. It outlives neither plan nor program.
class RequestScorer {
 public:
  static constexpr std::size_t kDepth = 16;  // of the stack of a score

  // tables: of each feature of each group. shared: 1 for features that have one value, or list, a request. Throws
  // std::invalid_argument if the two differ in shape, or the score's steps do not leave one number.
  RequestScorer(const RequestPlan& plan, const Program& program, std::vector<std::vector<u8>> tables,
                std::vector<std::vector<u8>> shared, std::vector<ScoreStep> score, u32 buckets);

  // As decode_requests, Plan::run, Store::lookup and HedgeLane::score one after the other; `lane` is of `model`. Nothing
  // if a record cannot be read, or a bucket is not held: those functions say which. Throws std::invalid_argument if store
  // and model do not fit the groups, or as they do.
  std::optional<ScoredRequests> score(Store& store, const HedgeModel& model, HedgeLane& lane, std::span<const u8> data,
                       std::span<const i64> ends, std::span<const u32> counts);

  std::size_t features() const { return features_; }

 private:
  struct Work {
    explicit Work(u32 buckets) : plan(buckets) {}
    Plan plan;
    std::vector<u8> tables, shared;
    Buffer<float> rows;
    Buffer<u8> found;
  };
  bool look_up(Store& store, const InputPlan& input, const DecodedRequests& made);
  float score_of(const float* predictions) const;
  void count_missing(std::size_t group, std::size_t first_feature, std::vector<i64>& out) const;

  const RequestPlan& plan_;
  const Program& program_;
  std::vector<Work> work_;
  std::vector<ScoreStep> score_;
  std::size_t features_ = 0;
  BatchView view_;
  std::vector<u32> request_ends_;
};

}  // namespace freshet
