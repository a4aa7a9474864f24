// A pass over decoded samples on one thread: batch after batch is looked up, scored, learned from and pushed, as a lane
// of the trainer does with each of its batches, without leaving native code between two of them.
#pragma once

#include <vector>

#include "freshet/hedge.hpp"
#include "freshet/plan.hpp"
#include "freshet/store.hpp"

namespace freshet {

// One store group's keys of N samples, feature-major as the decoder makes them.
struct PassGroup {
  const u64* keys = nullptr;
  const u32* starts = nullptr;     // (features + 1,) first key of each feature
  std::vector<const u32*> ends;    // per feature: null (a key a sample), or (N,) ends of each sample's keys
};

// N samples and what they teach.
struct PassSamples {
  i64 size = 0;
  std::vector<PassGroup> groups;
  const float* dense = nullptr;  // (N, D), NaN where missing
  const u8* label = nullptr;     // (N,)
  const float* value = nullptr;  // (N,)
  const float* weight = nullptr;  // (N,)
  const i64* times_ms = nullptr;  // (N,)
};

// Batches of all calls are offsets 0, 1, 2, ... of partition 0 of the store. Not thread-safe; it outlives neither store
// nor model.
class Pass {
 public:
  // tables: of each feature of each group. Throws std::invalid_argument if they do not fit the model's groups.
  Pass(Store& store, HedgeModel& model, std::vector<std::vector<u8>> tables);

  // Train on batches [ends[i - 1], ends[i]) in order; predictions (N, L) are from before each batch's own step. Throws
  // std::invalid_argument, before anything is learned, if ends do not rise to N or keys do not fit; std::logic_error if
  // the store has been pushed to by somebody else.
  void run(const PassSamples& samples, const i64* ends, size_t batches, float* predictions);

  size_t labels() const { return static_cast<size_t>(model_.labels()); }
  size_t dense() const { return model_.plan().input.dense.size(); }

 private:
  void check(const PassSamples& samples, const i64* ends, size_t batches) const;
  void train(const PassSamples& samples, i64 first, i64 last, float* predictions);
  void gather(const PassGroup& from, size_t group, i64 first, i64 last);

  // What a batch needs of one group, reused from batch to batch.
  struct Work {
    explicit Work(u32 buckets) : plan(buckets) {}
    Plan plan;
    std::vector<u8> tables;
    Buffer<u64> keys;
    Buffer<u32> starts;
    std::vector<Buffer<u32>> ends;
    Buffer<float> rows, gradients;
  };
  Store& store_;
  HedgeModel& model_;
  HedgeLane lane_;
  std::vector<Work> work_;
  BatchView view_;
  std::vector<PushGroup> push_;
  std::vector<double> losses_, rows_;
  i64 next_ = 0;
};

}  // namespace freshet
