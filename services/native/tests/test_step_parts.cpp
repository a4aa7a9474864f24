// A step in parts is the step: to the bit, whatever the number of parts.
#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "freshet/gate.hpp"
#include "freshet/mlp.hpp"

namespace freshet {
namespace {

MlpShape shape() { return {48, 16, {64, 32}, 2}; }

std::vector<float> stepped(Mode mode, int parts) {
  Mlp mlp(shape(), mode, true, kernels());
  for (size_t i = 0; i < mlp.weights().size(); ++i) mlp.weights()[i] = 0.01f * static_cast<float>(i % 37);
  mlp.pack();
  MlpLane one(mlp, true), two(mlp, true);
  for (int64_t step = 1; step <= 3; ++step) {
    for (int64_t i = 0; i < one.gradients.size(); ++i) {
      one.gradients.data()[i] = static_cast<float>((i * 7 + step) % 11) - 5.0f;
      two.gradients.data()[i] = static_cast<float>((i * 5 + step) % 13) - 6.0f;
    }
    for (int part = parts - 1; part >= 0; --part)
      mlp.step({one.gradients.data(), two.gradients.data()}, 20.0, {step, step}, part, parts);
  }
  std::vector<float> all(mlp.weights().begin(), mlp.weights().end());
  all.insert(all.end(), mlp.second_moment().begin(), mlp.second_moment().end());
  const MlpView view = mlp.view(nullptr);
  for (const LayerView& l : view.layers) {
    all.insert(all.end(), l.panels, l.panels + panel_floats(l.inputs, l.outputs) / (mode == Mode::kBf16 ? 2 : 1));
    all.insert(all.end(), l.transposed,
               l.transposed + panel_floats(l.outputs, l.inputs - l.back_from) / (mode == Mode::kBf16 ? 2 : 1));
  }
  for (const auto* lane : {&one, &two})
    all.insert(all.end(), lane->gradients.data(), lane->gradients.data() + lane->gradients.size());
  return all;
}

TEST(StepParts, AreTheWholeStep) {
  for (const Mode mode : {Mode::kFloat, Mode::kRounded, Mode::kBf16}) {
    if (mode == Mode::kBf16 && !kernels().bf16) continue;
    const std::vector<float> whole = stepped(mode, 1);
    for (const int parts : {2, 3, 7}) {
      const std::vector<float> shared = stepped(mode, parts);
      ASSERT_EQ(whole.size(), shared.size());
      EXPECT_EQ(0, std::memcmp(whole.data(), shared.data(), whole.size() * sizeof(float))) << parts << " parts";
    }
  }
}

TEST(Gate, LetsTheLastOneGoAloneAndTheOthersFollow) {
  constexpr int parties = 3, rounds = 2000;
  Gate gate(parties);
  int alone = 0;  // written by the last arriver only: the gate orders it
  std::vector<std::thread> threads;
  for (int t = 0; t < parties; ++t)
    threads.emplace_back([&] {
      for (int round = 0; round < rounds; ++round) {
        if (gate.arrive() == Gate::last) {
          alone++;
          gate.open();
        }
        EXPECT_GE(alone, round + 1);
        if (gate.arrive() == Gate::last) gate.open();  // no thread reads while the next one writes
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(alone, rounds);
}

// A dense step is half made where a thread that was let through does not take its part of it.
TEST(Gate, LetsThoseThroughForWhomItWasOpenedBeforeItBroke) {
  for (int round = 0; round < 2000; ++round) {
    Gate gate(2);
    const auto meet = [&] {
      const Gate::Turn turn = gate.arrive();
      EXPECT_NE(turn, Gate::broken);
      if (turn != Gate::last) return;
      gate.open();
      gate.abort();
    };
    std::thread other(meet);
    meet();
    other.join();
  }
}

TEST(Gate, ABrokenOneHoldsNobody) {
  Gate gate(2);
  std::thread waiting([&] { EXPECT_EQ(gate.arrive(), Gate::broken); });
  gate.abort();
  waiting.join();
  EXPECT_EQ(gate.arrive(), Gate::broken);
}

}  // namespace
}  // namespace freshet
