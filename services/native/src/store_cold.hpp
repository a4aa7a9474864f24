// What the sources of a store's rows on disk share.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "freshet/store.hpp"

namespace freshet {

// Shares of the limit of memory: where rows begin to move to disk, and how far they go. Beyond the limit lanes wait.
constexpr double kSpillFrom = 0.97, kSpillTo = 0.94;
constexpr auto kSpillPause = std::chrono::milliseconds(2);

struct Store::Cold {
  ColdSpec spec;
  std::mutex mutex;
  std::condition_variable wake, room;
  std::atomic<bool> stop{false};
  std::atomic<bool> stuck{false};  // all rows in memory wait to be published, or are in use
  std::atomic<int64_t> fetched{0}, spilled{0}, pages_read{0}, pages_written{0}, waits{0};
  std::string fault;  // the first one
  // Held while rows of a bucket leave memory, and by one who has seen them leave too often while it needed them. Comes
  // before the locks of buckets.
  std::recursive_mutex moving;
  // The thread's: the next bucket, and the rows met that may leave memory, once they are not in use.
  uint32_t cursor = 0;
  size_t movable = 0;
  std::minstd_rand random;
  std::thread thread;
  uint32_t period() const {
    return static_cast<uint32_t>(std::chrono::steady_clock::now().time_since_epoch() / spec.fetched_period);
  }
};

// Counts tries that failed because rows left memory meanwhile; from the third on none leave.
class Store::Retry {
 public:
  explicit Retry(Cold& cold) : moving_(cold.moving, std::defer_lock) {}
  void again() {
    if (++tries_ == 3) moving_.lock();
  }

 private:
  std::unique_lock<std::recursive_mutex> moving_;
  int tries_ = 0;
};

inline size_t table_index(const Group& group, uint8_t table) {
  return static_cast<size_t>(std::find(group.tables.begin(), group.tables.end(), table) - group.tables.begin());
}

}  // namespace freshet
