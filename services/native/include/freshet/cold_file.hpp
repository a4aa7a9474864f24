// Pages of a file on a local disk, read and written past the page cache, many at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace freshet {

// Thrown when a page cannot be read, or is not the one that was written.
class ColdFault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Bytes that the files of a store may take together; 0: as much as the disk has. Thread-safe.
class DiskBudget {
 public:
  explicit DiskBudget(size_t most) : most_(most) {}
  bool take(size_t bytes) {
    if (used_.fetch_add(bytes) + bytes <= most_ || most_ == 0) return true;
    give_back(bytes);
    return false;
  }
  void give_back(size_t bytes) { used_ -= bytes; }

 private:
  const size_t most_;
  std::atomic<size_t> used_{0};
};

// A file without a name: the system frees its space when the process ends, however it ends. Thread-safe.
//
// Transfers use the kernel's asynchronous I/O (io_submit): 2 to 3 us of a core a page of 4 KiB, where a thread for
// each read takes 8 to 10; io_uring takes as little, but container engines forbid it by default. A transfer needs a
// queue in the kernel (io_setup), and all processes of a machine share fs.aio-max-nr places in such queues. The file
// keeps its queues, the first from its creation on: where the kernel refuses another, transfers wait for each other.
class ColdFile {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;
  static constexpr size_t kSector = 4096;

  struct Transfer {
    uint32_t page;
    uint8_t* buffer;  // of page_bytes(), at a multiple of kSector
  };

  // page_bytes: a multiple of kSector. Throws ColdFault if the folder's file system cannot hold such a file, or the
  // kernel refuses a queue.
  ColdFile(const std::string& folder, size_t page_bytes, std::shared_ptr<DiskBudget> budget);
  ~ColdFile();
  ColdFile(const ColdFile&) = delete;
  ColdFile& operator=(const ColdFile&) = delete;

  size_t page_bytes() const { return page_bytes_; }
  // Append the numbers of `n` free pages, in a row where there are such; none and false if the budget or the
  // disk has no more. `returned`: pages that come back afterwards; where fewer come back than go, `kept` stay free.
  bool take(size_t n, size_t returned, size_t kept, std::vector<uint32_t>& pages);
  void release(const uint32_t* pages, size_t n);
  // Pages in a row with buffers in a row are one transfer.
  void read(const Transfer* transfers, size_t n) const { transfer(transfers, n, false); }  // throws ColdFault
  void write(const Transfer* transfers, size_t n) { transfer(transfers, n, true); }        // throws ColdFault
  size_t bytes_in_use() const;
  size_t bytes_on_disk() const;

 private:
  class Queue;
  std::unique_ptr<Queue> take_queue() const;
  void transfer(const Transfer* transfers, size_t n, bool write) const;
  bool extend();
  void release_one(uint32_t page);

  const std::string folder_;
  const size_t page_bytes_;
  const std::shared_ptr<DiskBudget> budget_;
  int fd_ = -1;
  mutable std::mutex mutex_;
  std::map<uint32_t, uint32_t> free_;  // first page and length of runs that do not touch
  size_t free_pages_ = 0;
  uint32_t extended_ = 0;  // pages that the file has on disk
  mutable std::mutex queues_mutex_;
  mutable std::condition_variable queue_came_back_;
  mutable std::vector<std::unique_ptr<Queue>> queues_;  // that no transfer uses
  mutable bool short_of_queues_ = false;
};

// Memory for pages, which a transfer needs at a multiple of ColdFile::kSector.
class PageBuffers {
 public:
  PageBuffers(size_t page_bytes, size_t pages);
  uint8_t* at(size_t i) const { return memory_.get() + i * page_bytes_; }

 private:
  struct Free {
    void operator()(uint8_t* p) const;
  };
  size_t page_bytes_;
  std::unique_ptr<uint8_t, Free> memory_;
};

}  // namespace freshet
