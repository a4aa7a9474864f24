#include "freshet/cold_file.hpp"

#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

namespace freshet {

namespace {

constexpr size_t kDepth = 128;                     // transfers of a thread that are under way
constexpr size_t kExtendBytes = size_t{64} << 20;  // of the file at a time
constexpr size_t kMostPages = ColdFile::kNone;     // of a file
constexpr size_t kMostBytes = size_t{256} << 10;   // of a transfer

std::string why(int error) { return std::strerror(error); }

std::string first_line(const char* path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

std::string refused(int error) {
  const std::string found = "expected asynchronous I/O for cold rows, found io_setup refused: " + why(error) + "; ";
  if (error != EAGAIN)
    return found + "allow io_setup, io_submit, io_getevents and io_destroy in the container's seccomp";
  return found + "a queue takes " + std::to_string(kDepth) + " of fs.aio-max-nr, and the machine's processes have " +
         first_line("/proc/sys/fs/aio-nr") + " of its " + first_line("/proc/sys/fs/aio-max-nr") +
         ": raise it there (sysctl -w fs.aio-max-nr=1048576)";
}

}  // namespace

// One transfer uses it at a time.
class ColdFile::Queue {
 public:
  Queue() {
    if (syscall(SYS_io_setup, kDepth, &context_) != 0) throw ColdFault(refused(errno));
  }
  ~Queue() { syscall(SYS_io_destroy, context_); }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  aio_context_t context() const { return context_; }

 private:
  aio_context_t context_ = 0;
};

ColdFile::ColdFile(const std::string& folder, size_t page_bytes, std::shared_ptr<DiskBudget> budget)
    : folder_(folder), page_bytes_(page_bytes), budget_(std::move(budget)) {
  queues_.push_back(std::make_unique<Queue>());
  fd_ = open(folder.c_str(), O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
  if (fd_ < 0)
    throw ColdFault("expected a folder on a local disk for cold rows, found " + folder + ": " + why(errno) +
                    "; its file system must know O_TMPFILE and O_DIRECT, as ext4 and xfs do");
}

// On a thread of its own: the system takes .1 s to free half a gigabyte, for which the caller would stand still.
ColdFile::~ColdFile() {
  try {
    std::thread([fd = fd_, queues = std::move(queues_)] { close(fd); }).detach();
  } catch (const std::system_error&) {  // no more threads
    close(fd_);
  }
}

// Under the lock.
bool ColdFile::extend() {
  const size_t step = std::max<size_t>(kExtendBytes / page_bytes_, 1), pages = extended_ + step;
  if (pages > kMostPages || !budget_->take(step * page_bytes_)) return false;
  int error;
  do error = posix_fallocate(fd_, static_cast<off_t>(extended_ * page_bytes_), static_cast<off_t>(step * page_bytes_));
  while (error == EINTR);
  if (error) budget_->give_back(step * page_bytes_);
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) return false;
  if (error) throw ColdFault("the file of cold rows in " + folder_ + " cannot grow: " + why(error));
  for (uint32_t page = extended_; page < pages; page++) release_one(page);
  extended_ = static_cast<uint32_t>(pages);
  return true;
}

// Under the lock.
void ColdFile::release_one(uint32_t page) {
  free_pages_++;
  auto next = free_.upper_bound(page);
  uint32_t length = 1;
  if (next != free_.end() && next->first == page + 1) {
    length += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == page) {
      before->second += length;
      return;
    }
  }
  free_.emplace_hint(next, page, length);
}

bool ColdFile::take(size_t n, size_t returned, size_t kept, std::vector<uint32_t>& pages) {
  const std::lock_guard lock(mutex_);
  while (free_pages_ < n || (returned < n && free_pages_ + returned < n + kept))
    if (!extend()) return false;
  const auto fits = [&] {
    return std::find_if(free_.begin(), free_.end(), [&](const auto& run) { return run.second >= n; });
  };
  auto run = fits();
  if (run == free_.end() && extend()) run = fits();
  if (run == free_.end()) run = free_.begin();  // in pieces
  for (size_t left = n; left > 0;) {
    const auto [first, length] = *run;
    const uint32_t taken = static_cast<uint32_t>(std::min<size_t>(left, length));
    for (uint32_t i = 0; i < taken; i++) pages.push_back(first + i);
    run = free_.erase(run);
    if (taken < length) free_.emplace_hint(run, first + taken, length - taken);
    left -= taken;
  }
  free_pages_ -= n;
  return true;
}

void ColdFile::release(const uint32_t* pages, size_t n) {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < n; i++) release_one(pages[i]);
}

size_t ColdFile::bytes_in_use() const {
  const std::lock_guard lock(mutex_);
  return (extended_ - free_pages_) * page_bytes_;
}

size_t ColdFile::bytes_on_disk() const {
  const std::lock_guard lock(mutex_);
  return extended_ * page_bytes_;
}

std::unique_ptr<ColdFile::Queue> ColdFile::take_queue() const {
  std::unique_lock lock(queues_mutex_);
  if (queues_.empty()) try {
      return std::make_unique<Queue>();
    } catch (const ColdFault& fault) {
      if (!std::exchange(short_of_queues_, true))
        std::fprintf(stderr, "freshet: reads and writes of cold rows wait for each other: %s\n", fault.what());
      queue_came_back_.wait(lock, [&] { return !queues_.empty(); });
    }
  auto queue = std::move(queues_.back());
  queues_.pop_back();
  return queue;
}

void ColdFile::transfer(const Transfer* transfers, size_t n, bool write) const {
  const auto give_back = [this](Queue* used) {
    {
      const std::lock_guard lock(queues_mutex_);
      queues_.emplace_back(used);
    }
    queue_came_back_.notify_one();
  };
  const std::unique_ptr<Queue, decltype(give_back)> queue(take_queue().release(), give_back);
  iocb blocks[kDepth];
  iocb* list[kDepth];
  io_event events[kDepth];
  std::vector<uint32_t> unused;  // of `blocks`
  for (uint32_t i = kDepth; i-- > 0;) unused.push_back(i);
  std::string fault;
  size_t more = 0;  // in `list`, to be submitted
  for (size_t next = 0, under_way = 0; next < n || more + under_way > 0;) {
    while (next < n && !unused.empty() && fault.empty()) {
      const Transfer& first = transfers[next];
      size_t pages = 1;
      while (next + pages < n && (pages + 1) * page_bytes_ <= kMostBytes &&
             transfers[next + pages].page == first.page + pages &&
             transfers[next + pages].buffer == first.buffer + pages * page_bytes_)
        pages++;
      iocb& block = blocks[unused.back()];
      std::memset(&block, 0, sizeof block);
      block.aio_data = unused.back();
      block.aio_fildes = static_cast<uint32_t>(fd_);
      block.aio_lio_opcode = write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
      block.aio_buf = reinterpret_cast<uint64_t>(first.buffer);
      block.aio_nbytes = pages * page_bytes_;
      block.aio_offset = static_cast<int64_t>(first.page * page_bytes_);
      unused.pop_back();
      list[more++] = &block;
      next += pages;
    }
    size_t sent = 0;
    while (sent < more) {
      const long taken = syscall(SYS_io_submit, queue->context(), more - sent, list + sent);
      if (taken > 0) {
        sent += static_cast<size_t>(taken);
      } else if (errno == EAGAIN) {
        break;  // the rest goes once some of these have ended
      } else if (errno != EINTR) {
        fault = "io_submit: " + why(errno);
        break;
      }
    }
    std::copy(list + sent, list + more, list);
    more -= sent;
    under_way += sent;
    if (!fault.empty()) next = n, more = 0;
    if (under_way == 0) continue;
    // Waiting for half of what is under way keeps the disk busy, at half the calls.
    const long got = syscall(SYS_io_getevents, queue->context(), static_cast<long>((under_way + 1) / 2),
                             static_cast<long>(kDepth), events, nullptr);
    if (got < 0) {
      if (errno == EINTR) continue;
      std::abort();  // the kernel may still write to the buffers
    }
    for (long i = 0; i < got; i++) {
      const iocb& block = blocks[events[i].data];
      if (static_cast<uint64_t>(events[i].res) != block.aio_nbytes)
        fault = events[i].res < 0 ? why(static_cast<int>(-events[i].res)) : "a part of a page";
      unused.push_back(static_cast<uint32_t>(events[i].data));
      under_way--;
    }
  }
  if (!fault.empty())
    throw ColdFault(std::string("cold rows in ") + folder_ + " cannot be " + (write ? "written" : "read") + ": " +
                    fault);
}

PageBuffers::PageBuffers(size_t page_bytes, size_t pages) : page_bytes_(page_bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, ColdFile::kSector, std::max<size_t>(page_bytes * pages, 1)) != 0) throw std::bad_alloc();
  memory_.reset(static_cast<uint8_t*>(p));
}

void PageBuffers::Free::operator()(uint8_t* p) const { std::free(p); }

}  // namespace freshet
