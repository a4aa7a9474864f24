#include "freshet/feature_decode.hpp"

#include <algorithm>
#include <stdexcept>

#include "freshet/bytes_column.hpp"
#include "freshet/feature_steps.hpp"
#include "freshet/feature_tile.hpp"

namespace freshet {
namespace {

void demand(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("feature plan: ") + what);
}

bool has_list(const std::vector<DecodePlan::Entry>& entries) {
  return std::any_of(entries.begin(), entries.end(), [](const auto& e) { return e.list; });
}

// Feature-major keys of a group. Without lists and bad records `made` is it already.
DecodedGroup assemble(const std::vector<DecodePlan::Entry>& entries, HeapArray<uint64_t> made, const FeatureTile& tile,
                      const FeatureArrays& arrays, size_t size) {
  DecodedGroup group;
  size_t total = 0;
  group.feature_starts.push_back(0);
  for (const auto& e : entries) {
    total += e.list ? tile.list(e.index).size() : size;
    if (total > UINT32_MAX) throw std::length_error("a batch holds more than 2^32 occurrences: take fewer records");
    group.feature_starts.push_back(static_cast<uint32_t>(total));
    group.lists.push_back(e.list ? static_cast<int64_t>(e.index) : -1);
  }
  if (total == made.size && !has_list(entries)) {
    group.keys = std::move(made);
    return group;
  }
  group.keys = HeapArray<uint64_t>::unwritten(total);
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto& e = entries[i];
    const uint64_t* from = e.list ? tile.list(e.index).data() : arrays.columns[e.index];
    std::copy_n(from, group.feature_starts[i + 1] - group.feature_starts[i],
                group.keys.begin() + group.feature_starts[i]);
  }
  return group;
}

// Arrays for n records. `made`: one a group, its single features one after the other; then one a segment.
FeatureArrays arrays_of(const DecodePlan& plan, size_t n, DecodedBatch& out, std::vector<HeapArray<uint64_t>>& made) {
  FeatureArrays arrays;
  arrays.stride = n;
  arrays.columns.assign(plan.columns, nullptr);
  for (const auto& entries : plan.groups) {
    const auto singles =
        static_cast<size_t>(std::count_if(entries.begin(), entries.end(), [](const auto& e) { return !e.list; }));
    made.push_back(HeapArray<uint64_t>::unwritten(singles * n));
    uint64_t* next = made.back().begin();
    for (const auto& e : entries) {
      if (e.list) continue;
      arrays.columns[e.index] = next;
      next += n;
    }
  }
  for (const auto c : plan.segments) {
    made.push_back(HeapArray<uint64_t>::unwritten(n));
    arrays.columns[c] = made.back().begin();
  }
  for (const auto* column : arrays.columns) demand(column || n == 0, "a key column belongs to no group");
  for (size_t l = 0; l < plan.list_max.size(); ++l) {
    out.list_ends.push_back(HeapArray<uint32_t>::unwritten(n));
    arrays.list_ends.push_back(out.list_ends.back().begin());
  }
  out.dense = HeapArray<float>::unwritten(n * plan.log1p.size());
  out.served = HeapArray<float>::filled(n * plan.served, kMissing);
  arrays.dense = out.dense.begin();
  arrays.served = out.served.begin();
  return arrays;
}

// Reads records of one program: by its steps if possible, else by the walker, which also reports the fault.
class Reader {
 public:
  Reader(const Program& program, FeatureTile& tile, const uint8_t* buffer_end)
      : program_(program), tile_(tile), steps_(program), walker_(program, tile, buffer_end), buffer_end_(buffer_end) {}

  bool read(const uint8_t* begin, const uint8_t* end) {
    tile_.begin_row(program_);
    if (buffer_end_ - end >= kStepSlack) {
      if (steps_.run(begin, end, tile_, walker_)) return true;
      tile_.undo_row();
      tile_.begin_row(program_);
    }
    if (walker_.walk(begin, end)) return true;
    tile_.undo_row();
    return false;
  }

  Failure failure() const { return walker_.failure(); }

 private:
  const Program& program_;
  FeatureTile& tile_;
  FeatureSteps steps_;
  Walker<FeatureTile> walker_;
  const uint8_t* buffer_end_;
};

void finish_dense(const DecodePlan& plan, DecodedBatch& out, bool serving) {
  const size_t columns = plan.log1p.size();
  out.dense.size = out.size * columns;
  if (serving) {
    for (const auto& [column, value] : plan.constant_dense) {
      for (size_t r = 0; r < out.size; ++r) out.dense.begin()[r * columns + column] = value;
    }
  }
  log1p_columns(out.dense.begin(), out.size, plan.log1p);
}

}  // namespace

int64_t time_part(int64_t time_ms, TimePart part) {
  constexpr int64_t kHour = 3'600'000, kDay = 24 * kHour;
  const int64_t within = (time_ms % kDay + kDay) % kDay;  // of the day; any 64-bit time will do
  const int64_t day = time_ms / kDay - (time_ms % kDay < 0);
  const int64_t hour = within / kHour;
  const int64_t weekday = (day % 7 + 7 + 3) % 7;  // 1 January 1970 was a Thursday
  switch (part) {
    case TimePart::kHour:
      return hour;
    case TimePart::kWeekday:
      return weekday;
    case TimePart::kHourOfWeek:
      return weekday * 24 + hour;
  }
  return 0;
}

void DecodePlan::check() const {
  const auto column = [&](uint32_t c) { demand(c < columns, "a key column is out of range"); };
  for (const auto& entries : groups) {
    for (const auto& e : entries) e.list ? demand(e.index < list_max.size(), "no such list") : column(e.index);
  }
  for (const auto c : segments) column(c);
  for (const auto& t : times) column(t.column);
  for (const auto& cross : crosses) {
    column(cross.column);
    demand(!cross.parts.empty(), "a cross has parts");
    for (const auto p : cross.parts) column(p);
  }
  for (const auto& c : constant_keys) column(c.first);
  for (const auto& c : constant_dense) demand(c.first < log1p.size(), "no such dense column");
}

void DecodePlan::check(const Program& program) const {
  for (const auto& s : program.sinks()) {
    const auto kind = static_cast<FeatureSink>(s.kind);
    demand(kind <= FeatureSink::kServed, "no such sink");
    demand(kind == FeatureSink::kServed || s.slot < (kind == FeatureSink::kList    ? list_max.size()
                                                     : kind == FeatureSink::kDense ? log1p.size()
                                                                                   : columns),
           "a sink's slot is out of range");
  }
}

DecodedBatch decode_features(const DecodePlan& plan, std::span<const Program* const> programs,
                             std::span<const int32_t> which, std::span<const uint8_t> data,
                             std::span<const int64_t> ends, std::span<const int64_t> times_ms, bool serving) {
  const BytesView view(data, ends);
  const size_t n = view.size();
  demand(times_ms.size() == n, "a time for each record");
  demand(which.empty() || which.size() == n, "a program for each record");
  for (const auto w : which) demand(w >= 0 && static_cast<size_t>(w) < programs.size(), "no such program");
  demand(!programs.empty() || n == 0, "no program");

  DecodedBatch out;
  std::vector<HeapArray<uint64_t>> made;
  const FeatureArrays arrays = arrays_of(plan, n, out, made);
  FeatureTile tile(plan, arrays, serving);
  const uint8_t* const buffer_end = data.data() + data.size();
  std::vector<Reader> readers;
  readers.reserve(programs.size());
  for (const auto* program : programs) readers.emplace_back(*program, tile, buffer_end);
  for (size_t i = 0; i < n; ++i) {
    const auto w = which.empty() ? 0 : static_cast<size_t>(which[i]);
    if (readers[w].read(data.data() + view.start(i), data.data() + view.end(i))) {
      tile.finish_row(times_ms[i]);
    } else {
      out.bad.push_back({static_cast<int64_t>(i), static_cast<int64_t>(w), readers[w].failure()});
    }
  }
  tile.finish();
  out.size = tile.row();
  finish_dense(plan, out, serving);
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    out.groups.push_back(assemble(plan.groups[g], std::move(made[g]), tile, arrays, out.size));
  }
  for (size_t s = 0; s < plan.segments.size(); ++s) {
    out.segments.push_back(std::move(made[plan.groups.size() + s]));
    out.segments.back().size = out.size;
  }
  for (auto& list_ends : out.list_ends) list_ends.size = out.size;
  for (uint32_t l = 1; l < plan.served && out.size < n; ++l) {
    std::copy_n(arrays.served + l * n, out.size, arrays.served + l * out.size);
  }
  out.served.size = out.size * plan.served;
  return out;
}

}  // namespace freshet
