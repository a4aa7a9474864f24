// Where the threads of a rank wait for each other, twice a step: a barrier that costs microseconds.
#pragma once

#include <atomic>
#include <cstdint>

#include "freshet/simd.hpp"

namespace freshet {

// The last of `parties` to arrive goes on alone until it opens the gate for the others.
class Gate {
 public:
  enum Turn : int { broken = -1, passed = 0, last = 1 };

  explicit Gate(std::uint32_t parties) : parties_(parties) {}

  // Blocks until the last one opens; a short wait spins, a longer one sleeps.
  Turn arrive() {
    const std::uint32_t round = round_.load(std::memory_order_acquire);
    if (broken_.load(std::memory_order_acquire)) return broken;
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == parties_) {
      arrived_.store(0, std::memory_order_relaxed);
      return last;
    }
    for (int i = 0; i < spins && round_.load(std::memory_order_acquire) == round; i++) spin_pause();
    round_.wait(round, std::memory_order_acquire);
    return broken_.load(std::memory_order_acquire) ? broken : passed;
  }
  void open() {
    round_.fetch_add(1, std::memory_order_acq_rel);
    round_.notify_all();
  }
  // Who waits, or arrives later, is told that the gate is broken.
  void abort() {
    broken_.store(true, std::memory_order_release);
    open();
  }

 private:
  static constexpr int spins = 1000;  // 20 to 40 us
  const std::uint32_t parties_;
  std::atomic<std::uint32_t> arrived_{0}, round_{0};
  std::atomic<bool> broken_{false};
};

}  // namespace freshet
