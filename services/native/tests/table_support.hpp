// Layouts and batches for the tests of plan, table and store.
#pragma once

#include <vector>

#include "freshet/plan.hpp"
#include "freshet/store.hpp"

namespace freshet::testing {

inline u64 key_of(u64 n) { return n * 0x9e3779b97f4a7c15ull; }

inline SlotSpec counting_slot(u32 width = 2) { return {0, width, 0.0f, "sgd", {{"lr", 1.0}}}; }

// Every rule, and widths that leave remainders of vectors.
inline std::vector<SlotSpec> mixed_slots() {
  const std::map<std::string, double> adagrad{{"lr", 0.1}, {"initial_accumulator", 0.0}, {"eps", 1e-8}};
  return {{0, 1, 0.0f, "adagrad", adagrad},
          {1, 3, 0.01f, "ftrl", {{"lr", 0.1}, {"beta", 1.0}, {"l1", 0.01}, {"l2", 0.1}}},
          {4, 5, 0.01f, "adam", {{"lr", 0.001}, {"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-8}}},
          {9, 2, 0.0f, "sgd", {{"lr", 0.1}}},
          {11, 21, 0.01f, "rowwise_adagrad", adagrad}};
}

// Rows of the default model: scalars, how often they were stepped, a vector.
inline std::vector<SlotSpec> counted_slots() {
  const std::map<std::string, double> adagrad{{"lr", 0.1}, {"initial_accumulator", 0.0}, {"eps", 1e-8}};
  return {{0, 1, 0.0f, "adagrad", adagrad}, {1, 1, 0.0f, "count", {}}, {2, 16, 0.01f, "rowwise_adagrad", adagrad}};
}

inline StoreSpec spec_of(std::vector<SlotSpec> slots, u32 buckets = 16, u32 partitions = 2, bool half = false) {
  StoreSpec spec;
  spec.groups = {{{0, 1}, std::move(slots), half}};
  spec.buckets = buckets;
  spec.partitions = partitions;
  return spec;
}

// Keys of table 0, planned.
struct Batch {
  explicit Batch(const std::vector<u64>& keys, u32 buckets = 16) : plan(buckets) {
    const u32 starts[2] = {0, static_cast<u32>(keys.size())};
    const u8 table = 0;
    plan.run(keys.data(), keys.size(), starts, &table, 1);
  }
  Keys keys() const { return {plan.keys.data(), plan.tables.data(), plan.unique(), plan.bucket_starts.data()}; }
  Plan plan;
};

inline std::vector<u64> numbered(u64 first, u64 last) {
  std::vector<u64> keys;
  for (u64 n = first; n < last; n++) keys.push_back(key_of(n));
  return keys;
}

inline Pushed push(Store& store, const Batch& batch, i64 partition, i64 start, const std::vector<float>& gradients,
                   i64 clock_ms = 0) {
  const i64 range[3] = {partition, start, start + 1};
  return store.push(range, 1, clock_ms, {{0, batch.keys(), gradients.data()}});
}

inline std::vector<float> look_up(Store& store, const Batch& batch, bool create = false) {
  std::vector<float> out(batch.plan.unique() * store.layout(0).width(), -1.0f);
  store.lookup(0, batch.keys(), out.data(), create, nullptr);
  return out;
}

inline std::vector<u32> all_buckets(const Store& store) {
  std::vector<u32> buckets(store.buckets());
  for (u32 b = 0; b < store.buckets(); b++) buckets[b] = b;
  return buckets;
}

inline size_t rows_of(const FlushBatch& batch) {
  size_t rows = 0;
  for (const RunEntry& run : batch.runs.directory) rows += run.rows;
  return rows;
}

inline size_t removed_of(const FlushBatch& batch) {
  size_t removed = 0;
  for (const RunEntry& run : batch.runs.directory) removed += run.removed;
  return removed;
}

}  // namespace freshet::testing
