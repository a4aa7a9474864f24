// Lanes that go from batch to batch together: whatever the number of threads and the order in which they run, every
// batch is pushed once and every step is of all lanes. Under a thread sanitizer this is where a race of the loop would
// show.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "freshet/hedge_loop.hpp"
#include "table_support.hpp"

namespace freshet {
namespace {

using testing::key_of;

constexpr size_t kRows = 40;  // of a batch: several steps of rows
constexpr int64_t kMoreSteps =
    5;  // dense steps of a new model's first batch, which are 1, 2, 4, 8, 16 and 9 rows, beyond one

HedgePlan plan_of(bool mlp) {
  HedgePlan plan;
  plan.input.width = 32;
  plan.input.vectors_from = 16;
  plan.input.scalars = 1;
  plan.input.dense = {{true, -1}};
  GroupPlan group{6, 0, 0, 1, 2, 4, 1, -1, {{mlp ? 16 : -1, false}, {mlp ? 20 : -1, false}}};
  plan.input.groups = {group};
  plan.losses = {Loss::kLogloss};
  plan.experts = {{.scalar = 0, .linear = true}, {.scalar = 0, .counts = true}};
  if (mlp) {
    plan.experts.push_back({.scalar = -1, .mlp = true});
    plan.hidden = {16};
    plan.mlp = true;
  }
  plan.experts.push_back({.scalar = -1, .stack = true});
  plan.batch_rows = kRows;
  return plan;
}

StoreSpec rows_of(uint32_t partitions) {
  return testing::spec_of({{0, 1, 0.0f, "adagrad", {{"lr", 0.1}, {"initial_accumulator", 0.0}, {"eps", 1e-8}}},
                           {1, 1, 0.0f, "count", {}},
                           {2, 4, 0.01f, "sgd", {{"lr", 0.1}}}},
                          16, partitions);
}

// Batches of one lane, some keys of which other lanes have, too.
struct Mine {
  Mine(uint32_t lane, size_t count)
      : lane(lane), n(count * kRows), dense(n), label(n), value(n), weight(n, 1.0f), times(n), predictions(n) {
    starts = {0, static_cast<uint32_t>(n), static_cast<uint32_t>(2 * n)};
    for (size_t i = 0; i < 2 * n; i++) keys.push_back(key_of(1 + (i * 7 + 3 * lane) % 40));
    for (size_t i = 0; i < n; i++) {
      dense[i] = static_cast<float>(i % 5);
      value[i] = static_cast<float>((i + lane) % 2);
      times[i] = 1'000 * static_cast<int64_t>(i);
    }
    for (size_t k = 0; k < count; k++) {
      ends.push_back(static_cast<int64_t>((k + 1) * kRows));
      ranges.insert(ranges.end(), {static_cast<int64_t>(lane), static_cast<int64_t>(k), static_cast<int64_t>(k + 1)});
      range_ends.push_back(static_cast<int64_t>(k + 1));
    }
    learn.assign(count, 1);
    keep.assign(count, 0);
  }
  LoopRan run(HedgeLoop& loop) {
    LoopSamples samples{static_cast<int64_t>(n),
                        {{keys.data(), starts.data(), {nullptr, nullptr}}},
                        dense.data(),
                        label.data(),
                        value.data(),
                        weight.data(),
                        times.data()};
    LoopBatches batches{ends.size(), ends.data(), ranges.data(), range_ends.data(), learn.data(), keep.data(), nullptr};
    return loop.run(lane, samples, batches, predictions.data());
  }

  uint32_t lane;
  size_t n;
  std::vector<uint64_t> keys;
  std::vector<uint32_t> starts;
  std::vector<float> dense;
  std::vector<uint8_t> label, learn, keep;
  std::vector<float> value, weight;
  std::vector<int64_t> times, ends, ranges, range_ends;
  std::vector<float> predictions;
};

class Loop : public ::testing::TestWithParam<std::tuple<bool, bool, bool>> {};

TEST_P(Loop, PushesEveryBatchOnceAndStepsAllLanesTogether) {
  const auto [mlp, sync, in_steps] = GetParam();
  constexpr uint32_t lanes = 3;
  constexpr size_t steps = 40;
  HedgeModel model(plan_of(mlp), true, false, kernels());
  Store store(rows_of(lanes));
  HedgeLoop loop(store, model, {{0, 1}}, lanes, sync, in_steps);
  for (int run = 0; run < 3; run++) {  // lanes of fewer batches join the others' steps
    std::vector<LoopRan> ran(lanes);
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < lanes; i++)
      threads.emplace_back([&, i] {
        Mine mine(i, steps - 5 * i);
        for (size_t k = 0; k < mine.ends.size(); k++) {
          mine.ranges[3 * k + 1] += run * static_cast<int64_t>(steps - 5 * i);
          mine.ranges[3 * k + 2] += run * static_cast<int64_t>(steps - 5 * i);
        }
        ran[i] = mine.run(loop);
      });
    for (auto& thread : threads) thread.join();
    for (uint32_t i = 0; i < lanes; i++) {
      EXPECT_EQ(ran[i].ended, LoopRan::done);
      EXPECT_EQ(ran[i].pushed, steps - 5 * i);
    }
  }
  EXPECT_EQ(loop.dense_steps(), static_cast<int64_t>(3 * steps) + (in_steps ? kMoreSteps : 0));
  EXPECT_EQ(model.state.step, loop.dense_steps());
  for (uint32_t i = 0; i < lanes; i++)
    EXPECT_EQ(store.applied()[i], std::set<int64_t>{static_cast<int64_t>(3 * (steps - 5 * i))});
}

INSTANTIATE_TEST_SUITE_P(Models, Loop, ::testing::Combine(::testing::Bool(), ::testing::Bool(), ::testing::Bool()));

TEST(LoopLanes, ALaneThatFailsLetsTheOthersGo) {
  HedgeModel model(plan_of(true), true, false, kernels());
  Store store(rows_of(2));
  HedgeLoop loop(store, model, {{0, 1}}, 2, false, true);
  std::thread failing([&] {
    Mine mine(0, 4);
    mine.ranges[3 * 2] = 9;  // no such partition
    EXPECT_THROW(mine.run(loop), std::invalid_argument);
  });
  Mine other(1, 4);
  EXPECT_EQ(other.run(loop).ended, LoopRan::broken);
  failing.join();
}

}  // namespace
}  // namespace freshet
