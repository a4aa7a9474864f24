// The training loop of native models: lanes go from batch to batch, each through plan, lookup, forward and backward,
// its share of the dense step, and push, without leaving native code between two batches.
//
// A batch is one push, and a dense step or several (`in_steps`): lanes meet at each. The caller judges which batches
// count (PROTOCOL 14) before a run; a lane with fewer steps joins the others' with no rows. A backtest's pass is a loop
// of one lane with its own store.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "freshet/gate.hpp"
#include "freshet/hedge.hpp"
#include "freshet/plan.hpp"
#include "freshet/store.hpp"

namespace freshet {

// One store group's keys of N samples, feature-major as the decoder makes them.
struct LoopGroup {
  const uint64_t* keys = nullptr;
  const uint32_t* starts = nullptr;   // (features + 1,) first key of each feature
  std::vector<const uint32_t*> ends;  // per feature: null (a key a sample), or (N,) ends of each sample's keys
};

// N samples with their labels.
struct LoopSamples {
  int64_t size = 0;
  std::vector<LoopGroup> groups;
  const float* dense = nullptr;       // (N, D), NaN where missing
  const uint8_t* label = nullptr;     // (N,)
  const float* value = nullptr;       // (N,)
  const float* weight = nullptr;      // (N,)
  const int64_t* times_ms = nullptr;  // (N,) event times
};

// Consecutive batches of one lane: batch i is samples [ends[i - 1], ends[i]), which may be none, and stands for ranges
// [range_ends[i - 1], range_ends[i]) of offsets.
struct LoopBatches {
  static constexpr size_t kMoments = 6;  // begun, keys planned, rows looked up, model done, dense step taken, pushed

  size_t count = 0;
  const int64_t* ends = nullptr;         // (count,)
  const int64_t* ranges = nullptr;       // (R, 3) partition, start, stop
  const int64_t* range_ends = nullptr;   // (count,)
  const uint8_t* learn_dense = nullptr;  // (count,) 0: only its row gradients count (PROTOCOL 14)
  const uint8_t* keep = nullptr;         // (count,) 1: copies of its rows are kept, see `kept`
  int64_t* moments_ns = nullptr;  // (count, moments) wall clock, filled in as far as batches came; null: not wanted
};

// What became of a lane's batches.
struct LoopRan {
  // broken: another lane has failed. refused, unread, not_held: of batch `pushed`; batches after it were not begun.
  enum Ended : int { done = 0, refused = 1, unread = 2, not_held = 3, broken = 4 };

  Ended ended = done;
  size_t trained = 0;               // batches whose rows and dense gradients were computed, and the latter stepped
  size_t pushed = 0;                // batches whose row gradients were acknowledged
  size_t skipped = 0;               // of these, how many every bucket had applied before
  uint32_t bucket = 0;              // where `not_held` or `unread`
  std::array<double, 6> seconds{};  // plan, lookup, forward and backward, wait, step, push
};

// Rows of a batch as they were before it was trained on, with the occurrences that use them.
struct LoopKept {
  struct Group {
    std::vector<float> rows;                  // (U, S)
    std::vector<int32_t> positions;           // (n,)
    std::vector<uint32_t> starts;             // (features + 1,)
    std::vector<std::vector<uint32_t>> ends;  // per feature; empty where the feature is no list
  };
  size_t batch = 0;
  std::vector<Group> groups;
};

// Store and model must outlive it. All lanes call `run` at the same time, each from a thread of its own; no other
// thread may use the model meanwhile. Other threads may use the store, but may not push partitions of a lane.
class HedgeLoop {
 public:
  // tables: of each feature of each group. sync: a batch's rows are looked up when all that was in flight is applied.
  // in_steps: rows and dense weights are stepped within a batch; if not, a batch is one step of both.
  // Throws std::invalid_argument if tables or store do not fit the model's groups.
  HedgeLoop(Store& store, HedgeModel& model, std::vector<std::vector<uint8_t>> tables, uint32_t lanes, bool sync,
            bool in_steps);
  ~HedgeLoop();
  HedgeLoop(const HedgeLoop&) = delete;
  HedgeLoop& operator=(const HedgeLoop&) = delete;

  // Train on the batches, and make steps with the other lanes until none of them has anything left to do.
  // predictions (N, L) are from before each batch's own step; those of batches that were not trained are not written.
  // Throws std::invalid_argument, before anything is learned here, if samples and batches do not fit the model or each
  // other; whatever it throws, the other lanes' calls end as `broken`, and so does every later call.
  LoopRan run(uint32_t lane, const LoopSamples& samples, const LoopBatches& batches, float* predictions);
  // Have every lane that waits, or will wait, end as `broken`.
  void abort();

  const std::vector<LoopKept>& kept(uint32_t lane) const;  // of its last run
  int64_t dense_steps() const { return dense_steps_; }     // made so far; between two runs
  uint32_t lanes() const { return static_cast<uint32_t>(lanes_.size()); }
  size_t labels() const { return static_cast<size_t>(model_.labels()); }
  size_t slots(size_t group) const { return static_cast<size_t>(model_.plan().input.groups.at(group).slots); }
  size_t dense() const { return model_.plan().input.dense.size(); }

 private:
  struct Lane;

  void check(const LoopSamples& samples, const LoopBatches& batches) const;
  bool meet(Lane& lane, Gate& gate, bool begins_step);
  void begin_step();
  void train(uint32_t lane, const LoopSamples& samples, const LoopBatches& batches, float* predictions, LoopRan& ran);

  Store& store_;
  HedgeModel& model_;
  std::vector<RowLayout> copies_;  // of the groups' rows, in float32 whatever the store holds
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<HedgeLane*> all_;
  Gate computed_, stepped_;
  bool waits_for_steps_, sync_;
  int64_t dense_steps_ = 0;
  bool busy_ = false, more_ = false;  // of any lane, as the last step began
};

}  // namespace freshet
