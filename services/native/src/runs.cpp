// Runs of packed rows: checked, sorted, merged.
#include "freshet/runs.hpp"

#include <algorithm>
#include <queue>

#include "freshet/block.hpp"

namespace freshet {

namespace {

constexpr size_t kFew = 24;  // sorted by insertion

std::string place_of(const RunEntry& run) {
  return "table " + std::to_string(run.table) + ", bucket " + std::to_string(run.bucket);
}

void insertion_sort(KeyAt* keys, size_t n) {
  for (size_t i = 1; i < n; i++) {
    const KeyAt moved = keys[i];
    size_t at = i;
    for (; at > 0 && keys[at - 1].key > moved.key; at--) keys[at] = keys[at - 1];
    keys[at] = moved;
  }
}

bool rising(const uint8_t* keys, size_t n) {
  for (size_t i = 1; i < n; i++)
    if (load_key(keys, i - 1) >= load_key(keys, i)) return false;
  return true;
}

}  // namespace

void sort_keys(KeyAt* keys, size_t n, std::vector<KeyAt>& scratch) {
  if (n <= kFew) return insertion_sort(keys, n);
  uint64_t least = keys[0].key, most = keys[0].key;
  for (size_t i = 1; i < n; i++) least = std::min(least, keys[i].key), most = std::max(most, keys[i].key);
  if (least == most) return;
  // As many cells as keys: dealt by their upper bits, a few keys share one.
  const int bits = static_cast<int>(std::bit_width(n)) - 1;
  const int shift = std::max(0, static_cast<int>(std::bit_width(most - least)) - bits);
  const size_t cells = static_cast<size_t>((most - least) >> shift) + 1;
  std::vector<uint32_t> next(cells + 1);
  for (size_t i = 0; i < n; i++) next[((keys[i].key - least) >> shift) + 1]++;
  for (size_t c = 0; c < cells; c++) next[c + 1] += next[c];
  scratch.assign(keys, keys + n);
  for (const KeyAt& key : scratch) keys[next[(key.key - least) >> shift]++] = key;
  uint32_t begin = 0;  // next[c] is now the end of cell c
  for (size_t c = 0; c < cells; begin = next[c], c++) {
    const auto before = [](const KeyAt& a, const KeyAt& b) { return a.key < b.key; };
    if (next[c] - begin > kFew)
      std::stable_sort(keys + begin, keys + next[c], before);
    else
      insertion_sort(keys + begin, next[c] - begin);
  }
}

std::string runs_fault(const RunsView& runs, const RecordWidths& widths) {
  uint64_t before = 0;
  for (const RunEntry& run : runs.directory) {
    if (run.table >= widths.size() || widths[run.table] == 0)
      return "rows of table " + std::to_string(run.table) + ", which the store does not have";
    if (run.place() < before) return "runs are not in order of bucket and table";
    before = run.place();
    // In this order none of it can overflow.
    const uint64_t bytes = run.bytes(widths[run.table]), size = runs.body.size();
    if (run.at < runs.start || run.at - runs.start > size || bytes > size - (run.at - runs.start))
      return "the run of " + place_of(run) + " goes beyond its body";
  }
  return {};
}

std::string keys_fault(const RunsView& runs, const RunEntry& run) {
  const uint8_t* keys = runs.of(run);
  if (block_crc32(keys, run.keys_bytes()) != run.keys_crc) return "keys of " + place_of(run) + " fail their CRC";
  if (!rising(keys, run.rows) || !rising(keys + size_t{8} * run.rows, run.removed))
    return "keys of " + place_of(run) + " do not rise";
  return {};
}

std::string records_fault(const RunsView& runs, const RunEntry& run, uint32_t width) {
  const uint32_t crc = block_crc32(runs.of(run) + run.keys_bytes(), size_t{run.rows} * width);
  return crc == run.records_crc ? std::string() : "rows of " + place_of(run) + " fail their CRC";
}

void seal(RunEntry& run, const uint8_t* bytes, uint32_t width) {
  run.keys_crc = block_crc32(bytes, run.keys_bytes());
  run.records_crc = block_crc32(bytes + run.keys_bytes(), size_t{run.rows} * width);
}

void pick_runs(const RunsView& runs, const RecordWidths& widths, std::span<const int64_t> buckets,
               std::span<const uint8_t> tables, std::span<const uint64_t> keys, RunColumns& out) {
  const auto place = [&](size_t i) { return static_cast<uint64_t>(buckets[i]) << 32 | tables[i]; };
  std::vector<uint32_t> rows;  // of one run
  size_t begin = 0;            // first key of the run's place, or of one behind it
  for (const RunEntry& run : runs.directory) {
    while (begin < keys.size() && place(begin) < run.place()) begin++;
    const uint8_t* const known = runs.of(run);
    rows.clear();
    uint32_t low = 0;
    for (size_t i = begin; i < keys.size() && place(i) == run.place(); i++) {
      for (uint32_t high = run.rows; low < high;) {
        const uint32_t middle = low + (high - low) / 2;
        load_key(known, middle) < keys[i] ? void(low = middle + 1) : void(high = middle);
      }
      if (low < run.rows && load_key(known, low) == keys[i]) rows.push_back(low);
    }
    if (rows.empty()) continue;
    const uint32_t width = widths[run.table];
    RunEntry picked{run.bucket, run.table, static_cast<uint32_t>(rows.size()), 0, out.body.size(), 0, 0};
    uint8_t* const bytes = out.body.extend(picked.bytes(width));
    for (size_t i = 0; i < rows.size(); i++) {
      store_key(bytes, i, load_key(known, rows[i]));
      std::memcpy(bytes + picked.keys_bytes() + i * width, known + run.keys_bytes() + size_t{rows[i]} * width, width);
    }
    seal(picked, bytes, width);
    out.directory.push_back(picked);
  }
}

namespace {

// Writes the merged runs of one table of one bucket after another.
class Merger {
 public:
  Merger(std::span<const RunsView> sources, bool keep_removed, uint64_t most_bytes, RunColumns& out)
      : sources_(sources), keep_removed_(keep_removed), most_bytes_(most_bytes), out_(out) {}

  void add(uint32_t source, const RunEntry& run) { parts_.push_back({source, sources_[source].of(run), &run, false}); }

  // All that was added, as one table of one bucket. Returns the fault of source `failed`, or an empty string.
  std::string write(uint32_t width, size_t& failed) {
    const RunEntry& first = *parts_.front().run;
    const bool as_it_is =
        parts_.size() == 1 && first.bytes(width) <= most_bytes_ && (keep_removed_ || first.removed == 0);
    as_it_is ? void(parts_[0].used = first.rows > 0) : sort_out();
    for (const Part& part : parts_) {
      failed = part.source;
      if (!part.used) continue;
      if (std::string why = records_fault(sources_[part.source], *part.run, width); !why.empty()) return why;
    }
    as_it_is ? copy(parts_[0], width) : write_sorted(first.bucket, first.table, width);
    parts_.clear();
    return {};
  }

 private:
  struct Part {
    uint32_t source;
    const uint8_t* bytes;
    const RunEntry* run;
    bool used;  // some of its records are the newest
    const uint8_t* record(uint32_t row, uint32_t width) const {
      return bytes + run->keys_bytes() + size_t{row} * width;
    }
  };

  void copy(const Part& part, uint32_t width) {
    if (part.run->keys_bytes() == 0) return;
    RunEntry run = *part.run;
    run.at = out_.body.size();
    const size_t bytes = run.bytes(width);
    std::memcpy(out_.body.extend(bytes), part.bytes, bytes);
    out_.directory.push_back(run);
  }

  // The first of equal keys is the newest: parts come newest first, and within a part its rows before its removed keys.
  void sort_out() {
    known_.clear();
    for (uint32_t p = 0; p < parts_.size(); p++) {
      const Part& part = parts_[p];
      const uint32_t rows = part.run->rows, all = rows + part.run->removed;
      for (uint32_t i = 0; i < all; i++) known_.push_back({load_key(part.bytes, i), p, i});
    }
    sort_keys(known_.data(), known_.size(), scratch_);
    alive_.clear();
    removed_.clear();
    for (size_t i = 0; i < known_.size(); i++) {
      if (i > 0 && known_[i].key == known_[i - 1].key) continue;
      Part& part = parts_[known_[i].source];
      if (known_[i].row < part.run->rows)
        alive_.push_back(known_[i]), part.used = true;
      else if (keep_removed_)
        removed_.push_back(known_[i].key);
    }
  }

  void write_sorted(uint32_t bucket, uint32_t table, uint32_t width) {
    const size_t most_rows = std::max<uint64_t>(1, most_bytes_ / 2 / (8 + width)),
                 most_removed = std::max<uint64_t>(1, most_bytes_ / 16);
    for (size_t row = 0, gone = 0; row < alive_.size() || gone < removed_.size();) {
      const size_t rows = std::min(alive_.size() - row, most_rows),
                   removed = std::min(removed_.size() - gone, most_removed);
      write_run({alive_.data() + row, rows}, {removed_.data() + gone, removed}, bucket, table, width);
      row += rows, gone += removed;
    }
  }

  void write_run(std::span<const KeyAt> rows, std::span<const uint64_t> removed, uint32_t bucket, uint32_t table,
                 uint32_t width) {
    RunEntry run{
        bucket, table, static_cast<uint32_t>(rows.size()), static_cast<uint32_t>(removed.size()), out_.body.size(),
        0,      0};
    uint8_t* const bytes = out_.body.extend(run.bytes(width));
    for (size_t i = 0; i < rows.size(); i++) store_key(bytes, i, rows[i].key);
    if (!removed.empty()) std::memcpy(bytes + 8 * rows.size(), removed.data(), 8 * removed.size());
    uint8_t* record = bytes + run.keys_bytes();
    for (const KeyAt& row : rows) {
      std::memcpy(record, parts_[row.source].record(row.row, width), width);
      record += width;
    }
    seal(run, bytes, width);
    out_.directory.push_back(run);
  }

  std::span<const RunsView> sources_;
  bool keep_removed_;
  uint64_t most_bytes_;
  RunColumns& out_;
  std::vector<Part> parts_;
  std::vector<KeyAt> known_, alive_, scratch_;
  std::vector<uint64_t> removed_;
};

}  // namespace

std::string merge_runs(std::span<const RunsView> newest_first, const RecordWidths& widths, bool keep_removed,
                       uint64_t most_bytes, RunColumns& out, size_t& failed) {
  struct Cursor {
    uint64_t place;
    uint32_t source;
    size_t at;
    bool operator<(const Cursor& other) const {  // the heap's first is the least place, of the newest source
      return place != other.place     ? place > other.place
             : source != other.source ? source > other.source
                                      : at > other.at;
    }
  };
  std::priority_queue<Cursor> heads;
  for (uint32_t s = 0; s < newest_first.size(); s++) {
    failed = s;
    if (std::string why = runs_fault(newest_first[s], widths); !why.empty()) return why;
    if (!newest_first[s].directory.empty()) heads.push({newest_first[s].directory[0].place(), s, 0});
  }
  Merger merger(newest_first, keep_removed, most_bytes, out);
  while (!heads.empty()) {
    const uint64_t place = heads.top().place;
    const uint32_t width = widths[place & 0xffffffffu];
    while (!heads.empty() && heads.top().place == place) {
      const Cursor head = heads.top();
      heads.pop();
      const RunsView& source = newest_first[head.source];
      const RunEntry& run = source.directory[head.at];
      failed = head.source;
      if (std::string why = keys_fault(source, run); !why.empty()) return why;
      merger.add(head.source, run);
      if (head.at + 1 < source.directory.size())
        heads.push({source.directory[head.at + 1].place(), head.source, head.at + 1});
    }
    if (std::string why = merger.write(width, failed); !why.empty()) return why;
  }
  return {};
}

}  // namespace freshet
