// Rows to and from pages of Redis hashes.
#include "freshet/redis_pages.hpp"

#include <algorithm>

#include "freshet/block.hpp"

namespace freshet {

namespace {

uint8_t* put(uint8_t* to, const void* from, size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
  return to + bytes;
}

// "$112\r\n", the head of an argument.
std::string head(size_t bytes) { return "$" + std::to_string(bytes) + "\r\n"; }

// Writes the pages of one bucket.
class PageWriter {
 public:
  PageWriter(uint64_t seq, bool whole, uint32_t page_bytes, PageWrites& out)
      : seq_(seq),
        part_(whole ? kPageOfAll : 0),
        page_bytes_(std::max<uint64_t>(page_bytes, sizeof(PageHead)) - sizeof(PageHead)),
        out_(out) {}

  int64_t pages() const { return pages_; }

  void add(const RunEntry& run, const uint8_t* bytes, uint32_t width) {
    const uint8_t* const removed = bytes + 8 * uint64_t{run.rows};
    const uint8_t* const records = bytes + run.keys_bytes();
    if (run.bytes(width) <= page_bytes_) {
      if (run.rows + run.removed > 0) page(run, bytes, removed, records, width);
      return;
    }
    const uint64_t most_rows = std::max<uint64_t>(1, page_bytes_ / (8 + width)),
                   most_removed = std::max<uint64_t>(1, page_bytes_ / 8);
    for (uint64_t row = 0; row < run.rows; row += most_rows) {
      const uint32_t n = static_cast<uint32_t>(std::min<uint64_t>(most_rows, run.rows - row));
      RunEntry cut{run.bucket, run.table, n, 0, 0, 0, 0};
      cut.keys_crc = block_crc32(bytes + 8 * row, 8 * uint64_t{n});
      cut.records_crc = block_crc32(records + row * width, uint64_t{n} * width);
      page(cut, bytes + 8 * row, nullptr, records + row * width, width);
    }
    for (uint64_t at = 0; at < run.removed; at += most_removed) {
      const uint32_t n = static_cast<uint32_t>(std::min<uint64_t>(most_removed, run.removed - at));
      RunEntry cut{run.bucket, run.table, 0, n, 0, 0, 0};
      cut.keys_crc = block_crc32(removed + 8 * at, 8 * uint64_t{n});
      cut.records_crc = block_crc32(removed, 0);
      page(cut, nullptr, removed + 8 * at, nullptr, width);
    }
  }

 private:
  void page(const RunEntry& run, const uint8_t* keys, const uint8_t* removed, const uint8_t* records, uint32_t width) {
    uint64_t first = ~uint64_t{0}, last = 0;
    const auto cover = [&](const uint8_t* of, uint32_t n) {
      if (n) first = std::min(first, load_key(of, 0)), last = std::max(last, load_key(of, n - 1));
    };
    cover(keys, run.rows);
    cover(removed, run.removed);
    const PageName name{seq_, part_++, run.table, first, last};
    const PageHead start{run.rows, run.removed, run.keys_crc, run.records_crc};
    const std::string name_head = head(sizeof name), value_head = head(sizeof start + run.bytes(width));
    uint8_t* to = out_.arguments.extend(name_head.size() + sizeof name + 2 + value_head.size() + sizeof start +
                                        run.bytes(width) + 2);
    to = put(put(put(to, name_head.data(), name_head.size()), &name, sizeof name), "\r\n", 2);
    to = put(put(to, value_head.data(), value_head.size()), &start, sizeof start);
    to = put(put(to, keys, 8 * size_t{run.rows}), removed, 8 * size_t{run.removed});
    put(put(to, records, size_t{run.rows} * width), "\r\n", 2);
    out_.ends.push_back(static_cast<int64_t>(out_.arguments.size()));
    pages_++;
  }

  uint64_t seq_;
  uint32_t part_;
  uint64_t page_bytes_;
  int64_t pages_ = 0;
  PageWrites& out_;
};

}  // namespace

std::string page_writes(const RunsView& runs, const RecordWidths& widths, std::span<const int64_t> buckets,
                        std::span<const int64_t> seqs, bool whole, uint32_t page_bytes, PageWrites& out) {
  if (std::string why = runs_fault(runs, widths); !why.empty()) return why;
  if (seqs.size() != buckets.size()) return "a bucket has no seq";
  size_t at = 0;
  for (size_t k = 0; k < buckets.size(); k++) {
    PageWriter writer(static_cast<uint64_t>(seqs[k]), whole, page_bytes, out);
    for (; at < runs.directory.size() && int64_t{runs.directory[at].bucket} == buckets[k]; at++) {
      const RunEntry& run = runs.directory[at];
      writer.add(run, runs.of(run), widths[run.table]);
    }
    out.pages.push_back(writer.pages());
  }
  return at == runs.directory.size() ? std::string() : "runs of a bucket that is not to be written, or not in order";
}

namespace {

struct Page {
  PageName name;
  RunEntry run;
  std::span<const uint8_t> body;
};

// Returns the fault of a page's field and value, or an empty string.
std::string parse_page(uint32_t bucket, std::span<const uint8_t> field, std::span<const uint8_t> value,
                       const RecordWidths& widths, Page& page) {
  if (field.size() != sizeof(PageName))
    return "a field of " + std::to_string(field.size()) + " bytes, expected " + std::to_string(sizeof(PageName));
  std::memcpy(&page.name, field.data(), sizeof page.name);
  const uint32_t table = page.name.table, width = table < widths.size() ? widths[table] : 0;
  if (width == 0) return "rows of table " + std::to_string(table) + ", which the store does not have";
  if (value.size() < sizeof(PageHead))
    return "a page of " + std::to_string(value.size()) + " bytes, shorter than its head";
  PageHead head;
  std::memcpy(&head, value.data(), sizeof head);
  page.run = {bucket, table, head.rows, head.removed, 0, head.keys_crc, head.records_crc};
  page.body = value.subspan(sizeof head);
  if (page.run.bytes(width) != page.body.size())
    return "a page of table " + std::to_string(table) + " of " + std::to_string(value.size()) + " bytes, expected " +
           std::to_string(sizeof head + page.run.bytes(width));
  return {};
}

}  // namespace

std::string runs_of_pages(std::span<const PagesOfBucket> buckets, const RecordWidths& widths, uint64_t most_bytes,
                          RunColumns& out, size_t& failed) {
  std::vector<Page> pages;
  std::vector<size_t> of;  // the bucket of each page
  for (failed = 0; failed < buckets.size(); failed++) {
    const auto& [bucket, items] = buckets[failed];
    if (items.size() % 2) return "a field without a value";
    const size_t begin = pages.size();
    for (size_t i = 0; i < items.size(); i += 2)
      if (std::string why = parse_page(bucket, items[i], items[i + 1], widths, pages.emplace_back()); !why.empty())
        return why;
    const auto newer = [](const Page& a, const Page& b) {
      return a.name.seq != b.name.seq ? a.name.seq > b.name.seq : a.name.part > b.name.part;
    };
    std::sort(pages.begin() + static_cast<ptrdiff_t>(begin), pages.end(), newer);
    of.resize(pages.size(), failed);
  }
  std::vector<RunsView> sources;
  sources.reserve(pages.size());
  for (const Page& page : pages) sources.push_back({{&page.run, 1}, page.body, 0});
  size_t source = 0;
  std::string why = merge_runs(sources, widths, false, most_bytes, out, source);
  failed = why.empty() || of.empty() ? 0 : of[source];
  return why;
}

}  // namespace freshet
