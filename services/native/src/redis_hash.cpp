// Rows to and from the fields of Redis hashes.
#include "freshet/redis_hash.hpp"

#include <algorithm>
#include <charconv>

namespace freshet {

namespace {

constexpr u8 field_head[] = {'$', '9', '\r', '\n'};
constexpr size_t field_argument = sizeof field_head + hash_field_bytes + 2;

u8* put(u8* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return to + bytes;
}

u8* put_end(u8* to) {
  *to++ = '\r';
  *to++ = '\n';
  return to;
}

u8* put_field(u8* to, u32 table, const u8* key) {
  to = put(to, field_head, sizeof field_head);
  *to++ = static_cast<u8>(table);
  return put_end(put(to, key, 8));
}

// "$112\r\n", the head of an argument; or "*9\r\n", that of a command.
std::string head(char kind, size_t n) { return kind + std::to_string(n) + "\r\n"; }

// Writes one bucket's HSET commands, each begun once it is known how many rows it will hold.
class Setter {
 public:
  Setter(std::span<const u8> key, u64 rows, u32 rows_per_command, Column<u8>& out)
      : key_(key), left_(rows), rows_per_command_(rows_per_command), out_(out) {}

  i64 commands() const { return commands_; }

  void add(const RunEntry& run, const u8* bytes, u32 width) {
    const std::string value_head = head('$', width);
    const size_t row_bytes = field_argument + value_head.size() + width + 2;
    const u8* record = bytes + run.keys_bytes();
    for (u32 row = 0; row < run.rows;) {
      if (open_ == 0) begin();
      const u32 n = static_cast<u32>(std::min<u64>(open_, run.rows - row));
      u8* to = out_.extend(n * row_bytes);
      for (u32 i = 0; i < n; i++, row++, record += width) {
        to = put_field(to, run.table, bytes + size_t{8} * row);
        to = put_end(put(put(to, value_head.data(), value_head.size()), record, width));
      }
      open_ -= n;
      left_ -= n;
    }
  }

 private:
  void begin() {
    open_ = std::min<u64>(left_, rows_per_command_);
    const std::string first = head('*', 2 + 2 * open_) + "$4\r\nHSET\r\n" + head('$', key_.size());
    u8* to = out_.extend(first.size() + key_.size() + 2);
    put_end(put(put(to, first.data(), first.size()), key_.data(), key_.size()));
    commands_++;
  }

  std::span<const u8> key_;
  u64 left_, open_ = 0;  // rows of the bucket, and of the command, that are still to come
  u32 rows_per_command_;
  i64 commands_ = 0;
  Column<u8>& out_;
};

}  // namespace

std::string hash_writes(const RunsView& runs, const RecordWidths& widths, std::span<const i64> buckets, const HashKeys& keys,
                        u32 rows_per_command, HashWrites& out) {
  if (std::string why = runs_fault(runs, widths); !why.empty()) return why;
  if (keys.ends.size() != buckets.size() || rows_per_command == 0) return "a hash has no key, or a command no row";
  size_t at = 0;
  i64 key_begins = 0;
  for (size_t k = 0; k < buckets.size(); k++) {
    if (keys.ends[k] < key_begins || keys.ends[k] > static_cast<i64>(keys.bytes.size())) return "keys of hashes overlap";
    const auto key = keys.bytes.subspan(static_cast<size_t>(key_begins), static_cast<size_t>(keys.ends[k] - key_begins));
    key_begins = keys.ends[k];
    const size_t first = at;
    u64 rows = 0, removed = 0;
    for (; at < runs.directory.size() && i64{runs.directory[at].bucket} == buckets[k]; at++)
      rows += runs.directory[at].rows, removed += runs.directory[at].removed;
    Setter setter(key, rows, rows_per_command, out.sets);
    for (size_t i = first; i < at; i++) {
      const RunEntry& run = runs.directory[i];
      const u8* bytes = runs.of(run);
      setter.add(run, bytes, widths[run.table]);
      u8* to = out.removed.extend(run.removed * field_argument);
      for (size_t r = run.rows; r < size_t{run.rows} + run.removed; r++) to = put_field(to, run.table, bytes + 8 * r);
    }
    out.set_ends.push_back(static_cast<i64>(out.sets.size()));
    out.set_commands.push_back(setter.commands());
    out.removed_ends.push_back(static_cast<i64>(out.removed.size()));
    out.removed_fields.push_back(static_cast<i64>(removed));
  }
  return at == runs.directory.size() ? std::string() : "runs of a bucket that is not to be written, or not in order";
}

namespace {

// One bucket's rows: sorted by table and key, then written.
class Reader {
 public:
  Reader(const RecordWidths& widths, u64 most_bytes, RunColumns& out) : widths_(widths), most_bytes_(most_bytes), out_(out) {}

  std::string read(const HashRows& hash) {
    if (std::string why = deal(hash.items); !why.empty()) return why;
    for (u32 table = 0; table < tables; table++) {
      const u32 begin = begins_[table], n = begins_[table + 1] - begin;
      if (n == 0) continue;
      sort_keys(keys_.data() + begin, n, scratch_);
      const auto same = [](const KeyAt& a, const KeyAt& b) { return a.key == b.key; };
      const auto end = std::unique(keys_.begin() + begin, keys_.begin() + begin + n, same);
      write(hash, table, {keys_.begin() + begin, end});
    }
    return {};
  }

 private:
  static constexpr u32 tables = 256;

  // Checks every field and value, and deals the rows by table.
  std::string deal(std::span<const std::span<const u8>> items) {
    if (items.size() % 2) return "a field without a value";
    std::array<u32, tables> counts{};
    for (size_t i = 0; i < items.size(); i += 2) {
      const auto& field = items[i];
      if (field.size() != hash_field_bytes)
        return "a field of " + std::to_string(field.size()) + " bytes, expected " + std::to_string(hash_field_bytes);
      const u32 width = widths_[field[0]];
      const std::string table = std::to_string(field[0]);
      if (width == 0) return "a row of table " + table + ", which the store does not have";
      if (items[i + 1].size() != width)
        return "a row of table " + table + " of " + std::to_string(items[i + 1].size()) + " bytes, expected " +
               std::to_string(width);
      counts[field[0]]++;
    }
    begins_[0] = 0;
    for (u32 t = 0; t < tables; t++) begins_[t + 1] = begins_[t] + counts[t];
    std::array<u32, tables> next;
    std::copy_n(begins_.begin(), tables, next.begin());
    keys_.resize(items.size() / 2);
    for (size_t i = 0; i < items.size(); i += 2)
      keys_[next[items[i][0]]++] = {load_key(items[i].data() + 1, 0), 0, static_cast<u32>(i / 2)};
    return {};
  }

  void write(const HashRows& hash, u32 table, std::span<const KeyAt> rows) {
    const u32 width = widths_[table];
    const size_t most_rows = std::max<u64>(1, most_bytes_ / (8 + width));
    for (size_t first = 0; first < rows.size(); first += most_rows) {
      const auto part = rows.subspan(first, std::min(most_rows, rows.size() - first));
      RunEntry run{hash.bucket, table, static_cast<u32>(part.size()), 0, out_.body.size(), 0, 0};
      u8* const bytes = out_.body.extend(run.bytes(width));
      u8* record = bytes + run.keys_bytes();
      for (size_t i = 0; i < part.size(); i++) {
        store_key(bytes, i, part[i].key);
        record = put(record, hash.items[2 * size_t{part[i].row} + 1].data(), width);
      }
      seal(run, bytes, width);
      out_.directory.push_back(run);
    }
  }

  const RecordWidths& widths_;
  u64 most_bytes_;
  RunColumns& out_;
  std::vector<KeyAt> keys_, scratch_;
  std::array<u32, tables + 1> begins_{};
};

}  // namespace

std::string runs_of_hashes(std::span<const HashRows> hashes, const RecordWidths& widths, u64 most_bytes, RunColumns& out,
                           size_t& failed) {
  Reader reader(widths, most_bytes, out);
  for (failed = 0; failed < hashes.size(); failed++)
    if (std::string why = reader.read(hashes[failed]); !why.empty()) return why;
  return {};
}

}  // namespace freshet
