// Layouts and batches for the tests of plan, table and store.
#pragma once

#include <vector>

#include "freshet/plan.hpp"
#include "freshet/store.hpp"

namespace freshet::testing {

inline uint64_t key_of(uint64_t n) { return n * 0x9e3779b97f4a7c15ull; }

inline SlotSpec counting_slot(uint32_t width = 2) { return {0, width, 0.0f, "sgd", {{"lr", 1.0}}}; }

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

inline StoreSpec spec_of(std::vector<SlotSpec> slots, uint32_t buckets = 16, uint32_t partitions = 2,
                         bool half = false) {
  StoreSpec spec;
  spec.groups = {{{0, 1}, std::move(slots), half}};
  spec.buckets = buckets;
  spec.partitions = partitions;
  return spec;
}

// Keys of table 0, planned.
struct Batch {
  explicit Batch(const std::vector<uint64_t>& keys, uint32_t buckets = 16) : plan(buckets) {
    const uint32_t starts[2] = {0, static_cast<uint32_t>(keys.size())};
    const uint8_t table = 0;
    plan.run(keys.data(), keys.size(), starts, &table, 1);
  }
  Keys keys() const { return {plan.keys.data(), plan.tables.data(), plan.unique(), plan.bucket_starts.data()}; }
  Plan plan;
};

inline std::vector<uint64_t> numbered(uint64_t first, uint64_t last) {
  std::vector<uint64_t> keys;
  for (uint64_t n = first; n < last; n++) keys.push_back(key_of(n));
  return keys;
}

inline Pushed push(Store& store, const Batch& batch, int64_t partition, int64_t start,
                   const std::vector<float>& gradients, int64_t clock_ms = 0) {
  const int64_t range[3] = {partition, start, start + 1};
  return store.push(range, 1, clock_ms, {{0, batch.keys(), gradients.data()}});
}

inline std::vector<float> look_up(Store& store, const Batch& batch, bool create = false) {
  std::vector<float> out(batch.plan.unique() * store.layout(0).width(), -1.0f);
  store.lookup(0, batch.keys(), out.data(), create, nullptr);
  return out;
}

inline std::vector<uint32_t> all_buckets(const Store& store) {
  std::vector<uint32_t> buckets(store.buckets());
  for (uint32_t b = 0; b < store.buckets(); b++) buckets[b] = b;
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
