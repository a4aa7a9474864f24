// Where the threads of a rank wait for each other, twice a step: a barrier that costs microseconds.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#include "freshet/simd.hpp"

namespace freshet {

// The last of `parties` to arrive goes on alone until it opens the gate for the others.
class Gate {
 public:
  enum Turn : int { broken = -1, passed = 0, last = 1 };

  explicit Gate(uint32_t parties) : parties_(parties) {}

  // Blocks until the last one opens; a short wait spins, a longer one sleeps.
  Turn arrive() {
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (broken_.load(std::memory_order_acquire)) return broken;
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == parties_) {
      arrived_.store(0, std::memory_order_relaxed);
      return last;
    }
    for (int i = 0; i < kSpins && round_.load(std::memory_order_acquire) == round; i++) spin_pause();
    if (round_.load(std::memory_order_acquire) == round) sleep(round);
    if (!broken_.load(std::memory_order_acquire)) return passed;
    uint64_t last_round;  // a thread that wakes late has passed if its round was opened before
    while ((last_round = broken_round_.load(std::memory_order_acquire)) == kNone) spin_pause();
    return round == last_round ? broken : passed;
  }
  void open() {
    round_.fetch_add(1);
    wake();
  }
  // Breaks the gate for all threads that wait or arrive later.
  void abort() {
    if (broken_.exchange(true)) return;
    broken_round_.store(round_.fetch_add(1), std::memory_order_release);
    wake();
  }

 private:
  // The kernel moves a thread that has lost its core (to a flush, say) to another core at the moment when that one
  // becomes idle, but only after the thread has waited for half a millisecond. So the first sleeps are short: in one
  // long sleep, the core would stay idle until the flush has used up its time slice of some milliseconds.
  void sleep(uint32_t round) {
    static_assert(sizeof round_ == sizeof round);
    constexpr int naps = 40;
    const timespec nap{0, 250'000};
    sleepers_.fetch_add(1);
    for (int i = 0; round_.load() == round; i++)
      syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, round, i < naps ? &nap : nullptr, nullptr, 0);
    sleepers_.fetch_sub(1);
  }

  void wake() {
    if (sleepers_.load()) syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  static constexpr int kSpins = 1000;  // 20 to 40 us
  static constexpr uint64_t kNone = UINT64_MAX;
  const uint32_t parties_;
  std::atomic<uint32_t> arrived_{0}, round_{0}, sleepers_{0};
  std::atomic<bool> broken_{false};
  std::atomic<uint64_t> broken_round_{kNone};  // whose threads do not pass
};

}  // namespace freshet
