// The dense part's kernels: every instruction set against plain loops and against the others. Gradients of the whole
// step are compared with autograd in tests/unit/model.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "freshet/hedge.hpp"

namespace freshet {
namespace {

constexpr int kInputs = 48, kFrom = 16, kBack = kInputs - kFrom;

struct Net {
  Mlp mlp;
  MlpLane lane;
  int n;
  std::vector<float> x, logits, dx, d_logits;

  Net(const Kernels& kernels, std::vector<int> hidden, int outputs, int rows)
      : mlp(MlpShape{kInputs, kFrom, std::move(hidden), outputs}, Mode::kFloat, true, kernels),
        lane(mlp, true),
        n(rows),
        x(static_cast<size_t>(rows) * kInputs),
        logits(static_cast<size_t>(rows) * outputs),
        dx(static_cast<size_t>(rows) * kBack),
        d_logits(logits.size()) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0.0f, 0.3f);
    for (float& w : mlp.weights()) w = normal(random);
    for (float& v : x) v = normal(random);
    for (float& v : d_logits) v = normal(random);
    mlp.pack();
    kernels.mlp_forward(Mode::kFloat, mlp.view(nullptr), lane.scratch(), 0, x.data(), kInputs, n, nullptr,
                        logits.data());
    kernels.mlp_backward(Mode::kFloat, mlp.view(lane.gradients.data()), lane.scratch(), 0, x.data(), kInputs, n,
                         d_logits.data(), dx.data(), kBack);
    kernels.mlp_gradients(Mode::kFloat, mlp.view(lane.gradients.data()), lane.scratch(), x.data(), kInputs, n);
  }

  // One row's logits by plain loops in double precision.
  std::vector<double> reference(int row) const {
    std::vector<double> h(x.begin() + row * kInputs, x.begin() + (row + 1) * kInputs);
    const MlpView view = mlp.view(nullptr);
    for (const LayerView& layer : view.layers) {
      std::vector<double> next(layer.outputs);
      for (int j = 0; j < layer.outputs; ++j) {
        double sum = layer.bias[j];
        for (int k = 0; k < layer.inputs; ++k) sum += h[k] * layer.weights[k * layer.outputs + j];
        next[j] = std::max(sum, 0.0);
      }
      h = next;
    }
    std::vector<double> out(view.outputs);
    for (int l = 0; l < view.outputs; ++l)
      for (int k = 0; k < view.inputs; ++k) out[l] += h[k] * view.head[l * view.inputs + k];
    return out;
  }

  // What d_logits are the gradient of.
  double loss() const {
    const int outputs = mlp.shape().outputs;
    double sum = 0.0;
    for (int i = 0; i < n; ++i) {
      const std::vector<double> z = reference(i);
      for (int l = 0; l < outputs; ++l) sum += z[l] * d_logits[i * outputs + l];
    }
    return sum;
  }

  double difference(float& at) const {
    const float kept = at, step = 1e-3f;
    at = kept + step;
    const double above = loss();
    at = kept - step;
    const double below = loss();
    at = kept;
    return (above - below) / (2.0 * step);
  }
};

class EveryKernel : public testing::TestWithParam<const char*> {
 protected:
  const Kernels& kernels() const { return *kernels_named(GetParam()); }
};

TEST_P(EveryKernel, ComputesTheLogitsOfPlainLoopsForAnyNumberOfRows) {
  for (const int rows : {1, 5, 6, 7, 255, 256})
    for (const auto& hidden :
         {std::vector<int>{16}, std::vector<int>{112, 80}, std::vector<int>{64, 48, 32}, std::vector<int>{}}) {
      const Net net(kernels(), hidden, 3, rows);
      for (int i = 0; i < rows; i += rows > 16 ? 50 : 1) {
        const std::vector<double> want = net.reference(i);
        for (int l = 0; l < 3; ++l) ASSERT_NEAR(net.logits[i * 3 + l], want[l], 1e-4) << rows << " rows, row " << i;
      }
    }
}

TEST_P(EveryKernel, HasTheGradientThatDifferencesHave) {
  Net net(kernels(), {32, 16}, 2, 9);
  const size_t all = net.mlp.weights().size();
  for (size_t i = 0; i < all; i += 97)
    EXPECT_NEAR(net.lane.gradients.data()[i], net.difference(net.mlp.weights()[i]), 2e-2) << "weight " << i;
  for (const int column : {0, 7, 31})
    EXPECT_NEAR(net.dx[3 * kBack + column], net.difference(net.x[3 * kInputs + kFrom + column]), 2e-2);
}

TEST_P(EveryKernel, LogisticIsAccurateAndDoesNotHideWhatIsNotFinite) {
  std::vector<float> z;
  for (int i = -4000; i <= 4000; ++i) z.push_back(static_cast<float>(i) * 0.03f);
  const size_t finite = z.size();
  z.push_back(std::nanf(""));
  z.push_back(INFINITY);
  std::vector<float> p(z.size()), s(z.size());
  kernels().logistic(z.data(), p.data(), s.data(), static_cast<int64_t>(z.size()));
  for (size_t i = 0; i < finite; ++i) {
    const double x = z[i], want = 1.0 / (1.0 + std::exp(-x)),
                 soft = std::log1p(std::exp(-std::fabs(x))) + std::max(x, 0.0);
    ASSERT_NEAR(p[i], want, 2e-7);
    ASSERT_NEAR(s[i], soft, 2e-7 + 2e-7 * soft);
  }
  EXPECT_TRUE(std::isnan(p[finite]) && std::isnan(s[finite]) && std::isnan(p[finite + 1]));
}

INSTANTIATE_TEST_SUITE_P(Model, EveryKernel, testing::ValuesIn(kernel_names()), [](const auto& named) {
  std::string name = named.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST(Model, GatherAndReduceAreEqualOnEveryInstructionSet) {
  InputPlan plan;
  plan.width = 32;
  plan.scalars = 2;
  plan.sums = 16;
  plan.groups.push_back({18, 0, 0, 2, 2, 16, -1, 0, {{0, false}, {16, true}}});
  check(plan);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> rows(10 * 18), dx(4 * 32), d_scalars(8);
  for (auto* values : {&rows, &dx, &d_scalars})
    for (float& v : *values) v = normal(random);
  const std::vector<float> c{0.3f, -1.0f, 0.5f, 2.0f};
  const std::vector<int32_t> positions{0, 3, -1, 0, 1, 2, 2, 9, -1, 4};
  const std::vector<uint32_t> starts{0, 4, 10}, ends{2, 2, 5, 6};
  std::vector<std::vector<float>> results;
  for (const char* name : kernel_names()) {
    const Kernels& k = *kernels_named(name);
    std::vector<float> x(4 * 32), scalars(8), sums(64), squares(16), fm(4), pooled(18), gradients(rows.size()),
        csum(10);
    BatchView batch;
    batch.size = 4;
    batch.groups.push_back(
        {rows.data(), 10, positions.data(), 10, starts.data(), {nullptr, ends.data()}, nullptr, gradients.data()});
    check(plan, batch, 1);
    Gathered out;
    out.x = x.data();
    out.stride = 32;
    out.scalars = scalars.data();
    out.sums = sums.data();
    out.squares = squares.data();
    out.fm = fm.data();
    out.pooled = pooled.data();
    k.gather(Mode::kFloat, plan, batch, {nullptr, nullptr, 10.0f}, 0, 4, out);
    Upstream up;
    up.dx = dx.data();
    up.stride = 32;
    up.scalars = d_scalars.data();
    up.sums = sums.data();
    up.c = c.data();
    up.pooled = pooled.data();
    float* const csums[] = {csum.data()};
    k.reduce(plan, batch, 0, 4, up, csums);
    k.finish_reduce(plan.groups[0], batch.groups[0], csum.data());
    std::vector<float> all(x);
    for (const auto* part : {&scalars, &sums, &fm, &gradients}) all.insert(all.end(), part->begin(), part->end());
    results.push_back(all);
  }
  for (const auto& other : results) EXPECT_EQ(other, results.front());
}

TEST(Model, APlanThatLeavesItsRowsIsRefused) {
  InputPlan plan;
  plan.width = 16;
  plan.scalars = 1;
  plan.groups.push_back({10, 0, 0, 1, 1, 16, -1, -1, {{0, false}}});
  EXPECT_THROW(check(plan), std::invalid_argument);
}

}  // namespace
}  // namespace freshet
