// Rows on disk where the kernel refuses a queue of transfers or is slow to read. The core's calls of the kernel by
// number pass through this file.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdarg>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "cold_support.hpp"

namespace {

std::atomic<int> refused{0};                                    // errno of every io_setup, if not 0
thread_local std::function<void(const iocb& first)> on_submit;  // the next one of this thread

}  // namespace

// In place of the C library's, which it calls.
extern "C" __attribute__((no_sanitize("address", "undefined"))) long syscall(long number, ...) noexcept {
  using Real = long (*)(long, ...);
  static std::atomic<Real> real{nullptr};
  if (real == nullptr) real = reinterpret_cast<Real>(dlsym(RTLD_NEXT, "syscall"));
  long with[6];
  va_list list;
  va_start(list, number);
  for (long& one : with) one = va_arg(list, long);
  va_end(list);
  if (number == SYS_io_setup && refused) {
    errno = refused;
    return -1;
  }
  if (number == SYS_io_submit && on_submit) std::exchange(on_submit, nullptr)(**reinterpret_cast<iocb**>(with[2]));
  return real.load()(number, with[0], with[1], with[2], with[3], with[4], with[5]);
}

namespace freshet {
namespace {

using namespace testing;

class Refusal {
 public:
  explicit Refusal(int error) { refused = error; }
  ~Refusal() { refused = 0; }
};

StoreSpec unpublished() {
  StoreSpec spec = spec_of({counting_slot(16)});
  spec.consumed = {false, false};
  return spec;
}

TEST(ColdKernel, TransfersShareTheQueuesThatItGrants) {
  constexpr uint64_t kRows = 8'000;
  Store store(unpublished());
  store.keep_cold(tight(100'000));
  const Batch all(numbered(1, kRows + 1));
  ASSERT_EQ(push(store, all, 0, 0, std::vector<float>(kRows * 16, 1.0f)), Pushed::applied);
  wait_until_spilled(store, kRows / 2);
  const Refusal refusal(EAGAIN);
  std::atomic<size_t> read{0};
  std::vector<std::thread> lanes;
  for (uint64_t lane = 0; lane < 4; lane++)
    lanes.emplace_back([&, lane] {
      try {
        for (uint64_t first = 1 + 2'000 * lane; first < 2'000 * (lane + 1); first += 100)
          for (const float x : look_up(store, Batch(numbered(first, first + 100)))) read += x == -1.0f;
      } catch (const ColdFault& fault) {
        ADD_FAILURE() << fault.what();
      }
    });
  for (std::thread& lane : lanes) lane.join();
  EXPECT_EQ(read, kRows * 16);
  EXPECT_NO_THROW(store.check_cold());
}

TEST(ColdKernel, StartNamesWhatRefusesAQueue) {
  for (const auto& [error, remedy] : {std::pair{EAGAIN, "sysctl -w fs.aio-max-nr"}, {EPERM, "seccomp"}}) {
    const Refusal refusal(error);
    try {
      Store(unpublished()).keep_cold(tight());
      ADD_FAILURE() << "no queue, and yet a store";
    } catch (const ColdFault& fault) {
      EXPECT_NE(std::string(fault.what()).find(remedy), std::string::npos) << fault.what();
    }
  }
}

// After a fetch has read the directory and before it reads a page, a merge may free the page, and other rows take it.
TEST(ColdKernel, ReadsAgainARowWhosePageWasTaken) {
  for (const uint32_t taker : {0u, 1u}) {  // the row's own bucket, and another
    Store store(unpublished());
    store.keep_cold(tight(1));
    uint64_t numbers = 0;
    int64_t rows = 0, pushes = 0;
    const auto add = [&](uint32_t bucket, size_t n) {
      std::vector<uint64_t> keys;
      while (keys.size() < n)
        if (const uint64_t key = key_of(++numbers); key >> 60 == bucket) keys.push_back(key);
      ASSERT_EQ(push(store, Batch(keys), 0, pushes++, std::vector<float>(n * 16, 1.0f)), Pushed::applied);
      wait_until_spilled(store, rows += static_cast<int64_t>(n));
    };
    add(0, 1);
    const Batch row({key_of(numbers)});
    const RowId id{row.keys().keys[0], 0};
    add(0, 1'000);
    const ColdRows format(folder(), std::make_shared<DiskBudget>(0), store.layout(0).packed_bytes(), 2, 16);
    const PageBuffers page(format.file.page_bytes(), 1);

    std::mutex mutex;
    std::condition_variable changed;
    int file = -1;
    int64_t at = 0;
    bool taken = false;
    uint8_t here = 0;
    std::thread reader([&] {
      on_submit = [&](const iocb& first) {
        std::unique_lock lock(mutex);
        file = static_cast<int>(first.aio_fildes);
        at = first.aio_offset;
        changed.notify_one();
        changed.wait(lock, [&] { return taken; });
      };
      try {
        store.fetch(0, row.keys(), &here);
      } catch (const ColdFault& fault) {
        ADD_FAILURE() << fault.what();
      }
    });
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return file >= 0; });
    }
    const auto is_taken = [&] {
      EXPECT_EQ(pread(file, page.at(0), format.file.page_bytes(), at), static_cast<ssize_t>(format.file.page_bytes()));
      const uint8_t* now = page.at(0);
      return format.is_whole(now) && format.bucket_of(now) == taker && format.find(now, id) == nullptr;
    };
    EXPECT_FALSE(is_taken());
    add(0, 1'000);  // a merge
    for (int turn = 0; turn < 100 && !is_taken(); turn++) add(taker, 200);
    EXPECT_TRUE(is_taken());
    {
      const std::lock_guard lock(mutex);
      taken = true;
    }
    changed.notify_one();
    reader.join();
    EXPECT_EQ(here, 1) << "a page of bucket " << taker;
    EXPECT_NO_THROW(store.check_cold());
  }
}

}  // namespace
}  // namespace freshet
