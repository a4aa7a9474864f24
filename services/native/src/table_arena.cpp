#include "freshet/table_arena.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <new>
#include <string>
#include <system_error>

namespace freshet {

namespace {

constexpr size_t kHugePage = 2u << 20;
constexpr size_t kMostReserved = size_t{1} << 40;
constexpr size_t kLeastReserved = size_t{1} << 28;  // where a limit on addresses is set (ulimit -v)

constexpr size_t whole_huge_pages(size_t bytes) { return (bytes + kHugePage - 1) & ~(kHugePage - 1); }

std::string mib(size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

// Bytes to have ready beyond those in use: a quarter, from half a huge page on, so that small tables stay small; and at
// most what 100 batches of 2,000 new rows take.
constexpr size_t ahead_of(size_t used) {
  return used < kHugePage / 2 ? 0 : std::clamp(used / 4, kHugePage, size_t{16} << 20);
}

// Bytes beyond those in use that batches may come to while a huge page is made.
constexpr size_t distance_of(size_t used) { return std::clamp(used / 8, kHugePage / 2, size_t{8} << 20); }

// Makes the system allocate and clear the memory of [from, to) while other threads use it: a byte that is not 0 is in a
// page that is there already, and a 0 stays 0. Not by madvise(MADV_POPULATE_WRITE), which blocks all threads that map
// memory.
__attribute__((no_sanitize("thread"))) void touch(uint8_t* from, const uint8_t* to, size_t page) {
  for (uint8_t* at = from; at < to; at += page) {
    uint8_t zero = 0;
    __atomic_compare_exchange_n(at, &zero, uint8_t{0}, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
}

// Addresses for the next arena: twice the memory that the machine has, so that no table is short of them, and at most a
// 64th of what is left of 2^46, half of what a process has: two arenas for each group of each store share it.
std::atomic<size_t> reserved_by_all{0};

size_t addresses_for_next() {
  constexpr size_t shared = size_t{1} << 46;
  struct sysinfo machine{};
  const bool known = sysinfo(&machine) == 0;
  const size_t memory = known ? (size_t{machine.totalram} + machine.totalswap) * machine.mem_unit : kMostReserved;
  const size_t left = shared - std::min(shared, reserved_by_all.load(std::memory_order_relaxed));
  return std::clamp(std::min(std::bit_ceil(2 * memory), std::bit_floor(left / 64)), kLeastReserved, kMostReserved);
}

}  // namespace

NoMemory::NoMemory(const std::string& what) : what_(std::make_shared<const std::string>("rows of a table: " + what)) {}

Arena::Arena(size_t piece) : piece_(piece), page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
  for (size_t bytes = addresses_for_next(); bytes >= kLeastReserved; bytes /= 2) {
    void* p = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) continue;
    mapping_ = static_cast<uint8_t*>(p);
    mapping_bytes_ = bytes + kHugePage;
    base_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + kHugePage - 1) & ~(kHugePage - 1));
    reserved_ = bytes;
    reserved_by_all += bytes;
    return;
  }
  throw NoMemory(
      "no range of " + mib(kLeastReserved) +
      " of addresses is left in this process; raise its limit (ulimit -v), or let stores go that are no longer used");
}

Arena::~Arena() {
  wanted_ = kStop;
  wanted_.notify_one();
  if (toucher_.joinable()) toucher_.join();
  munmap(mapping_, mapping_bytes_);
  reserved_by_all -= reserved_;
}

// Makes the range usable up to `bytes`, in steps that double up to 64 MiB: one mapping, never many. Two threads may do
// the same at once.
void Arena::commit(size_t bytes) {
  size_t now = committed_.load(std::memory_order_relaxed);
  if (bytes <= now) return;
  if (bytes > reserved_)
    throw NoMemory(mib(bytes) + " are asked for, and " + mib(reserved_) +
                   " of addresses are reserved; spread the rows over more shards, or give tables max_rows or a ttl");
  size_t target = std::max(bytes, now + std::clamp(now, kHugePage, size_t{64} << 20));
  target = std::min(whole_huge_pages(target), reserved_);
  if (mprotect(base_ + now, target - now, PROT_READ | PROT_WRITE) != 0)
    throw NoMemory(
        "the system refused " + mib(target - now) + " beyond " + mib(now) +
        "; give the process more memory, spread the rows over more shards, or give tables max_rows or a ttl");
  madvise(base_ + now, target - now, MADV_NOHUGEPAGE);  // until `touch_ahead` comes; who is faster has small pages
  while (now < target && !committed_.compare_exchange_weak(now, target, std::memory_order_relaxed)) {
  }
}

uint32_t Arena::size_class(uint64_t n) { return static_cast<uint32_t>(std::bit_width(n)) - 1; }

uint64_t Arena::take(uint64_t n) {
  const std::lock_guard lock(mutex_);
  // A freed run of the same class may still be too short, one of the next class never is.
  for (uint32_t c = size_class(n); c <= std::min(size_class(n) + 1, 47u); c++) {
    auto& list = freed_[c];
    const size_t looked_at = std::min<size_t>(list.size(), 8);
    for (size_t i = list.size(); i > list.size() - looked_at; i--) {
      const Freed run = list[i - 1];
      if (run.n < n) continue;
      list[i - 1] = list.back();
      list.pop_back();
      if (run.n > n) freed_[size_class(run.n - n)].push_back({run.first + n, run.n - n});
      in_use_ += n;
      hold(run.first, n);
      return run.first;
    }
  }
  commit((end_ + n) * piece_);
  const uint64_t first = end_;
  end_ += n;
  in_use_ += n;
  hold(first, n);
  ask_ahead();
  return first;
}

// Under the lock, after the end has moved.
void Arena::ask_ahead() {
  const size_t used = end_ * piece_, ahead = ahead_of(used);
  const size_t wanted = std::min(whole_huge_pages(used + ahead), reserved_);
  used_.store(used, std::memory_order_relaxed);
  if (ahead == 0 || wanted <= wanted_) return;
  wanted_ = wanted;
  if (!toucher_.joinable()) try {
      toucher_ = std::thread([this] { touch_ahead(); });
    } catch (const std::system_error&) {  // no more threads: the user of a piece touches its pages
    }
  wanted_.notify_one();
}

// The thread: it yields to batches where cores are short, and takes no lock, for they would wait until it has its turn.
// It makes huge pages, which batches never do: a new one takes .2 ms, and 5 ms in a virtual machine whose host has to
// find the memory. Two who touch the same huge page make one each, so it keeps a distance from what is handed out.
void Arena::touch_ahead() {
  setpriority(PRIO_PROCESS, 0, 10);  // of this thread; 10 has a tenth of the share of 0
  for (size_t touched = 0;;) {
    const size_t wanted = wanted_;
    if (wanted == kStop) return;
    const size_t used = used_.load(std::memory_order_relaxed);
    touched = std::max(touched, whole_huge_pages(used + distance_of(used)));
    if (touched >= wanted) {
      madvise(base_, used / kHugePage * kHugePage, MADV_HUGEPAGE);  // the system makes them of small ones later
      wanted_.wait(wanted);
      continue;
    }
    try {
      commit(touched + kHugePage);
    } catch (const std::bad_alloc&) {  // `take` of a piece there will throw
      return;
    }
    madvise(base_ + touched, kHugePage, MADV_HUGEPAGE);
    touch(base_ + touched, base_ + touched + kHugePage, page_);
    touched += kHugePage;
  }
}

void Arena::hold(uint64_t first, uint64_t n) {
  const auto [begin, end] = pages(first, n);
  if (end > users_.size()) users_.resize(end);
  for (size_t page = begin; page < end; page++) users_[page]++;
}

// Neighbours share the pages at a run's ends, so the last of them releases a page: of blocks of 5 KB, each alone would
// release a third. Under the lock, as otherwise a page could be reused before it is released.
void Arena::release_pages(uint64_t first, uint64_t n) {
  const auto [begin, end] = pages(first, n);
  size_t empty = begin;  // pages [empty, page) have no user left
  for (size_t page = begin; page <= end; page++) {
    if (page < end && --users_[page] == 0) continue;
    if (empty < page) madvise(base_ + empty * page_, (page - empty) * page_, MADV_DONTNEED);
    empty = page + 1;
  }
}

void Arena::release(uint64_t first, uint64_t n) {
  const std::lock_guard lock(mutex_);
  release_pages(first, n);
  freed_[size_class(n)].push_back({first, n});
  in_use_ -= n;
}

size_t Arena::bytes_in_use() const {
  const std::lock_guard lock(mutex_);
  return in_use_ * piece_;
}

}  // namespace freshet
