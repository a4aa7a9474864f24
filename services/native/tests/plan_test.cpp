#include "freshet/plan.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

namespace freshet {
namespace {

TEST(Plan, NamesEachTableAndKeyOnceInOrderOfItsBucket) {
  std::mt19937_64 random(1);
  Plan plan(64);
  for (const uint32_t rows : {0u, 1u, 300u, 50u, 5000u}) {
    std::vector<uint64_t> keys;
    std::vector<uint32_t> starts{0};
    const std::vector<uint8_t> tables{2, 0, 2};
    for (size_t f = 0; f < tables.size(); f++) {
      for (uint32_t i = 0; i < rows; i++) keys.push_back((random() % 200) * 0x0123456789abcdefull);
      starts.push_back(static_cast<uint32_t>(keys.size()));
    }
    plan.run(keys.data(), keys.size(), starts.data(), tables.data(), tables.size());

    std::map<std::pair<uint8_t, uint64_t>, uint32_t> expected;
    for (size_t i = 0; i < keys.size(); i++)
      if (keys[i] != absent_key) expected[{tables[i / std::max(rows, 1u)], keys[i]}]++;
    ASSERT_EQ(plan.unique(), expected.size());
    for (size_t u = 0; u < plan.unique(); u++) {
      const auto uses = plan.order_starts.data()[u + 1] - plan.order_starts.data()[u];
      EXPECT_EQ(uses, (expected[{plan.tables.data()[u], plan.keys.data()[u]}]));
    }
    for (uint32_t b = 0; b < 64; b++)
      for (uint32_t u = plan.bucket_starts.data()[b]; u < plan.bucket_starts.data()[b + 1]; u++)
        EXPECT_EQ(plan.keys.data()[u] >> 58, b);
    for (size_t i = 0; i < keys.size(); i++) {
      const int32_t at = plan.positions.data()[i];
      if (keys[i] == absent_key)
        EXPECT_EQ(at, -1);
      else
        EXPECT_EQ(plan.keys.data()[at], keys[i]);
    }
  }
}

TEST(Plan, RefusesStartsThatDoNotFit) {
  Plan plan(16);
  const std::vector<uint64_t> keys{1, 2};
  const std::vector<uint32_t> starts{0, 3};
  const uint8_t table = 0;
  EXPECT_THROW(plan.run(keys.data(), keys.size(), starts.data(), &table, 1), std::invalid_argument);
  EXPECT_THROW(Plan(12), std::invalid_argument);
}

}  // namespace
}  // namespace freshet
