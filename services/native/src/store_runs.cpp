// Runs of packed rows, as the row store keeps them: taken at recovery, unpacked for serving.
#include <stdexcept>
#include <string>

#include "freshet/store.hpp"

namespace freshet {

RecordWidths Store::packed_widths() const {
  RecordWidths widths{};
  for (const auto& group : groups_)
    for (const uint8_t table : group->tables) widths[table] = group->layout.packed_bytes();
  return widths;
}

// Runs from outside are checked, except that their checksums have been verified.
void Store::check_runs(const RunsView& runs) const {
  if (std::string why = runs_fault(runs, packed_widths()); !why.empty()) throw std::invalid_argument(why);
  for (const RunEntry& run : runs.directory) {
    check_bucket(run.bucket);
    const uint8_t table = static_cast<uint8_t>(run.table);
    const RowLayout& layout = groups_[group_of(table)]->layout;
    const uint8_t *keys = runs.of(run), *records = keys + run.keys_bytes();
    for (uint32_t i = 0; i < run.rows; i++) {
      const uint64_t key = load_key(keys, i);
      const char* fault = key == 0 ? "its key is 0, which no row has"
                          : bucket_of(key) != run.bucket
                              ? "its key is of another bucket"
                              : layout.packed_fault(records + size_t{i} * layout.packed_bytes(), table);
      if (fault)
        throw std::invalid_argument("row " + std::to_string(i) + " of table " + std::to_string(run.table) +
                                    ", bucket " + std::to_string(run.bucket) + ", key " + std::to_string(key) + ": " +
                                    fault);
    }
  }
}

void Store::import_runs(const RunsView& runs) {
  if (spec_.serving) throw std::invalid_argument("a serving store takes values, not packed rows: use import_values");
  check_runs(runs);
  for (const RunEntry& run : runs.directory) {
    const uint8_t table = static_cast<uint8_t>(run.table);
    Group& group = *groups_[group_of(table)];
    const uint32_t packed = group.layout.packed_bytes();
    const uint8_t *keys = runs.of(run), *records = keys + run.keys_bytes();
    if (cold_) wait_for_room();
    std::vector<uint64_t> found;  // keys as they are aligned
    if (cold_)
      for (uint32_t i = 0; i < run.rows; i++) found.push_back(load_key(keys, i));
    const std::unique_lock lock = lock_fetched(run.bucket, table, found.data(), found.size());
    for (uint32_t i = 0; i < run.rows; i++)
      import_row(group, run.bucket, load_key(keys, i), table, records + size_t{i} * packed);
  }
}

std::vector<UnpackedTable> Store::unpack_runs(const RunsView& runs) const {
  if (spec_.serving) throw std::invalid_argument("a serving store does not know how packed rows are laid out");
  check_runs(runs);
  std::array<int, 256> at;
  at.fill(-1);
  std::vector<UnpackedTable> out;
  std::vector<uint64_t> memory;  // of one row
  for (const RunEntry& run : runs.directory) {
    if (run.rows == 0) continue;
    const RowLayout& layout = groups_[group_of(static_cast<uint8_t>(run.table))]->layout;
    if (at[run.table] < 0) {
      at[run.table] = static_cast<int>(out.size());
      out.emplace_back();
      out.back().table = static_cast<uint8_t>(run.table);
      out.back().width = layout.width();
    }
    UnpackedTable& table = out[static_cast<size_t>(at[run.table])];
    const uint8_t *keys = runs.of(run), *record = keys + run.keys_bytes();
    memory.resize(layout.record_bytes() / 8 + 1);
    const Row row = layout.row(reinterpret_cast<uint8_t*>(memory.data()));
    std::memcpy(table.keys.extend(run.rows), keys, size_t{8} * run.rows);
    float* values = table.values.extend(size_t{run.rows} * layout.width());
    uint32_t* touched = table.touched.extend(run.rows);
    for (uint32_t i = 0; i < run.rows; i++, record += layout.packed_bytes(), values += layout.width()) {
      layout.unpack(row, record);
      layout.load(row, values);
      touched[i] = row.header().touched;
    }
  }
  return out;
}

}  // namespace freshet
