#include "freshet/table_cold.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "freshet/hash.hpp"
#include "freshet/simd.hpp"

namespace freshet {

namespace {

constexpr size_t kMostPageBytes = 64u << 10;

uint64_t hash_of(RowId id) { return mix64(id.key ^ (static_cast<uint64_t>(id.table) << 56)); }

// Pages of a few sectors, so that two choices spread rows evenly and little space is left behind the last one.
size_t page_bytes_for(size_t record, size_t head) {
  for (size_t bytes = ColdFile::kSector; bytes < kMostPageBytes; bytes += ColdFile::kSector) {
    const size_t rows = (bytes - head) / record;
    if (rows >= 24 && static_cast<double>(bytes - rows * record) <= 0.04 * static_cast<double>(bytes)) return bytes;
  }
  const size_t least = 4 * record + head;
  return std::max(kMostPageBytes, (least + ColdFile::kSector - 1) / ColdFile::kSector * ColdFile::kSector);
}

struct Bits {
  explicit Bits(uint64_t h) : at{h & 255, (h >> 8) & 255, (h >> 16) & 255} {}
  uint64_t at[3];
};

}  // namespace

void ColdRecord::write(uint8_t* at, uint64_t key, bool dirty, bool stored, uint32_t epoch) {
  const uint32_t stamp = (epoch << 2) | (stored ? 2u : 0u) | (dirty ? 1u : 0u);
  std::memcpy(at, &key, 8);
  std::memcpy(at + 8, &stamp, 4);
}

ColdRows::ColdRows(const std::string& folder, std::shared_ptr<DiskBudget> budget, uint32_t packed_bytes, size_t tables,
                   uint32_t buckets)
    : file(folder, page_bytes_for(packed_bytes + ColdRecord::kHead, kPageHead), std::move(budget)),
      record_bytes_(packed_bytes + ColdRecord::kHead),
      rows_of_page_(static_cast<uint32_t>((file.page_bytes() - kPageHead) / record_bytes_)),
      // The emptier of two is taken: no page is more than some three rows above the mean.
      fullest_(std::clamp(1.0 - 3.5 / rows_of_page_, 0.5, 0.92)),
      bins_(buckets) {
  for (ColdBin& one : bins_) {
    one.rows.assign(tables, 0);
    bytes_ += bytes_of(one);
  }
}

size_t ColdRows::bytes_of(const ColdBin& bin) {
  return sizeof(ColdBin) + (bin.base.capacity() + bin.log.capacity()) * sizeof(ColdPage) +
         bin.index.capacity() * sizeof(uint16_t) + bin.rows.capacity() * sizeof(uint32_t) + bin.erased.size() * 40;
}

template <typename Change>
void ColdRows::counted(ColdBin& bin, Change change) {
  const size_t before = bytes_of(bin);
  change();
  bytes_.fetch_add(bytes_of(bin) - before, std::memory_order_relaxed);
}

std::pair<uint32_t, uint32_t> ColdRows::homes(RowId id, size_t pages) {
  const uint64_t h = hash_of(id);
  const uint32_t first = static_cast<uint32_t>(high_product(h, pages));
  const uint32_t second = static_cast<uint32_t>(high_product(h * 0x9e3779b97f4a7c15ull, pages));
  return {first, second != first ? second : static_cast<uint32_t>((first + 1) % pages)};
}

bool ColdRows::in_filter(const ColdPage& page, uint64_t h) {
  for (const uint64_t bit : Bits(h).at)
    if (!(page.filter[bit / 64] >> (bit % 64) & 1)) return false;
  return true;
}

namespace {

// Visit the pages of the log that the index has for a hash, in no order.
template <typename Visit>
void each_logged(const ColdBin& bin, uint64_t h, Visit visit) {
  const size_t size = bin.index.size();
  if (size == 0) return;
  for (size_t at = high_product(h * 0xd6e8feb86659fd93ull, size); bin.index[at]; at = at + 1 == size ? 0 : at + 1)
    if (bin.index[at] >> 8 == static_cast<int>(h >> 56)) visit((bin.index[at] & 0xffu) - 1);
}

}  // namespace

size_t ColdRows::pages_of(const ColdBin& bin, RowId id, std::vector<const ColdPage*>& pages) const {
  pages.clear();
  if (!bin.erased.empty() && bin.erased.contains(id)) return 0;
  const uint64_t h = hash_of(id);
  each_logged(bin, h, [&](uint32_t page) { pages.push_back(&bin.log[page]); });
  std::sort(pages.begin(), pages.end(), std::greater<>());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  const size_t of_log = pages.size();
  if (!bin.base.empty()) {
    const auto [first, second] = homes(id, bin.base.size());
    if (in_filter(bin.base[first], h)) pages.push_back(&bin.base[first]);
    if (in_filter(bin.base[second], h)) pages.push_back(&bin.base[second]);
  }
  return of_log;
}

bool ColdRows::may_hold(const ColdBin& bin, RowId id) const {
  if (bin.erased.contains(id)) return false;
  const uint64_t h = hash_of(id);
  bool found = false;
  each_logged(bin, h, [&](uint32_t) { found = true; });
  if (found || bin.base.empty()) return found;
  const auto [first, second] = homes(id, bin.base.size());
  return in_filter(bin.base[first], h) || in_filter(bin.base[second], h);
}

void ColdRows::append(ColdBin& bin, const ColdPage& page, const RowId* ids, size_t n) {
  counted(bin, [&] {
    if (bin.index.empty()) bin.index.assign(log_limit(bin) * 4 / 3 + 1, 0);
    bin.log.push_back(page);
  });
  bin.log_rows += static_cast<uint32_t>(n);
  const size_t size = bin.index.size();
  for (size_t i = 0; i < n; i++) {
    const uint64_t h = hash_of(ids[i]);
    size_t at = high_product(h * 0xd6e8feb86659fd93ull, size);
    while (bin.index[at]) at = at + 1 == size ? 0 : at + 1;
    bin.index[at] = static_cast<uint16_t>((h >> 56) << 8 | bin.log.size());
  }
}

void ColdRows::replace(ColdBin& bin, std::vector<ColdPage> base, const RowIds& dropped) {
  release(bin);
  counted(bin, [&] {
    bin.base = std::move(base);
    // Others than the moving thread, whose it is, replace by no pages.
    if (!bin.base.empty()) most_base_ = std::max(most_base_, bin.base.size());
    bin.log = std::vector<ColdPage>();  // `= {}` would keep the memory
    bin.index = std::vector<uint16_t>();
    for (const RowId& id : dropped) bin.erased.erase(id);
  });
  bin.merges++;
  bin.base_rows = bin.log_rows = 0;
  for (const ColdPage& page : bin.base) bin.base_rows += page.rows;
}

void ColdRows::erase(ColdBin& bin, RowId id) {
  counted(bin, [&] { bin.erased.insert(id); });
}

void ColdRows::release(const ColdBin& bin) {
  std::vector<uint32_t> numbers;
  for (const auto* pages : {&bin.base, &bin.log})
    for (const ColdPage& page : *pages) numbers.push_back(page.number);
  file.release(numbers.data(), numbers.size());
}

bool ColdRows::is_whole(const uint8_t* page) const {
  return read_u64(page) == xxh3_64(page + 8, file.page_bytes() - 8, 0) && rows_in(page) <= rows_of_page_;
}

uint32_t ColdRows::bucket_of(const uint8_t* page) const { return read_u32(page + 12); }

uint16_t ColdRows::sum_of(const uint8_t* page) { return static_cast<uint16_t>(read_u64(page)); }

uint32_t ColdRows::rows_in(const uint8_t* page) const { return read_u32(page + 8); }

const uint8_t* ColdRows::find(const uint8_t* page, RowId id) const {
  const uint8_t* at = page + kPageHead;
  for (uint32_t n = rows_in(page); n-- > 0; at += record_bytes_)
    if (read_u64(at) == id.key && ColdRecord(at).table() == id.table) return at;
  return nullptr;
}

ColdRows::Builder::Builder(const ColdRows& cold, uint32_t bucket, uint8_t* at) : cold_(cold), at_(at) {
  std::memset(at_, 0, cold_.file.page_bytes());
  std::memcpy(at_ + 12, &bucket, 4);
}

void ColdRows::Builder::add(const uint8_t* record, uint32_t epoch) {
  std::memcpy(at_ + kPageHead + static_cast<size_t>(page.rows++) * cold_.record_bytes_, record, cold_.record_bytes_);
  const ColdRecord row(record);
  for (const uint64_t bit : Bits(hash_of(row.id())).at) page.filter[bit / 64] |= uint64_t{1} << (bit % 64);
  if (row.dirty(epoch)) page.dirty = true, page.dirty_epoch = epoch;
}

void ColdRows::Builder::seal() {
  std::memcpy(at_ + 8, &page.rows, 4);
  const uint64_t sum = xxh3_64(at_ + 8, cold_.file.page_bytes() - 8, 0);
  std::memcpy(at_, &sum, 8);
  page.sum = sum_of(at_);
}

size_t ColdRows::base_pages_for(size_t rows) const {
  return std::max<size_t>(static_cast<size_t>(std::ceil(static_cast<double>(rows) / (rows_of_page_ * fullest_))), 2);
}

void ColdRows::clear(ColdBin& bin) {
  replace(bin, {}, RowIds(bin.erased));
  bin.dirty = 0;
  bin.next_version();
  std::fill(bin.rows.begin(), bin.rows.end(), 0);
}

}  // namespace freshet
