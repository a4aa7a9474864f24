#include "freshet/feature_decode.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "freshet/avro_walk.hpp"
#include "freshet/bytes_column.hpp"
#include "freshet/hash.hpp"

namespace freshet {
namespace {

constexpr float kMissing = std::numeric_limits<float>::quiet_NaN();

void demand(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("feature plan: ") + what);
}

// Writes what the walker finds into row `row` of the batch's columns.
struct FeatureHandler {
  static constexpr bool kExplodes = false;

  const DecodePlan* plan;
  const std::uint64_t* words = nullptr;  // of the program at work
  std::vector<std::uint64_t*> columns;
  std::vector<std::vector<std::uint64_t>> lists;
  std::vector<std::size_t> list_starts;  // of this record's elements
  float* dense = nullptr;
  float* served = nullptr;
  std::size_t stride = 0;  // N: records of the batch
  std::size_t row = 0;
  std::uint32_t predictions = 0;  // seen in this record

  void number(const Sink& s, double v) {
    if (static_cast<FeatureSink>(s.kind) == FeatureSink::kDense) {
      const auto f = static_cast<float>(v);
      dense[row * plan->log1p.size() + s.slot] = std::isfinite(f) ? f : kMissing;
    } else if (static_cast<FeatureSink>(s.kind) == FeatureSink::kBucket) {
      if (v != v) return;
      std::int64_t edges = 0;
      for (std::uint32_t i = 0; i < s.words_size; ++i) edges += std::bit_cast<double>(words[s.words_begin + i]) <= v;
      columns[s.slot][row] = key_of_int(edges, s.salt);
    } else if (predictions < plan->served) {
      served[predictions++ * stride + row] = static_cast<float>(v);
    }
  }

  void key(const Sink& s, std::uint64_t k) {
    if (static_cast<FeatureSink>(s.kind) == FeatureSink::kKey) {
      columns[s.slot][row] = k;
    } else if (k != kAbsentKey && lists[s.slot].size() - list_starts[s.slot] < plan->list_max[s.slot]) {
      lists[s.slot].push_back(k);
    }
  }

  static bool is_key(const Sink& s) { return s.kind <= static_cast<std::uint32_t>(FeatureSink::kList); }

  void on_int(const Sink& s, std::int64_t v) {
    is_key(s) ? key(s, key_of_int(v, s.salt)) : number(s, static_cast<double>(v));
  }
  void on_double(const Sink& s, double v) { is_key(s) ? key(s, key_of_double(v, s.salt)) : number(s, v); }
  void on_bytes(const Sink& s, const std::uint8_t* p, std::size_t n) {
    if (is_key(s)) key(s, key_of_bytes(p, n, s.salt));
  }
  void on_enum(const Sink& s, std::uint32_t symbol) {
    if (is_key(s) && symbol < s.words_size) key(s, words[s.words_begin + symbol]);
  }

  void begin_record() {
    predictions = 0;
    for (std::size_t l = 0; l < lists.size(); ++l) list_starts[l] = lists[l].size();
  }

  // Forget what a record that turned out bad has written.
  void undo_record() {
    for (auto* column : columns) column[row] = kAbsentKey;
    for (std::size_t l = 0; l < lists.size(); ++l) lists[l].resize(list_starts[l]);
    std::fill_n(dense + row * plan->log1p.size(), plan->log1p.size(), kMissing);
    for (std::uint32_t l = 0; l < plan->served; ++l) served[l * stride + row] = kMissing;
  }
};

void fill_derived(const DecodePlan& plan, const FeatureHandler& h, std::span<const std::int64_t> times,
                  std::size_t size, bool serving) {
  for (const auto& t : plan.times) {
    std::uint64_t* out = h.columns[t.column];
    for (std::size_t r = 0; r < size; ++r) out[r] = key_of_int(time_part(times[r], t.part), t.salt);
  }
  if (serving) {
    for (const auto& [column, key] : plan.constant_keys) std::fill_n(h.columns[column], size, key);
    for (const auto& [column, value] : plan.constant_dense) {
      for (std::size_t r = 0; r < size; ++r) h.dense[r * plan.log1p.size() + column] = value;
    }
  }
  std::vector<std::uint64_t> parts;
  for (const auto& cross : plan.crosses) {
    parts.resize(cross.parts.size());
    for (std::size_t r = 0; r < size; ++r) {
      for (std::size_t k = 0; k < parts.size(); ++k) parts[k] = h.columns[cross.parts[k]][r];
      h.columns[cross.column][r] = key_of_cross(parts.data(), parts.size(), cross.seed);
    }
  }
}

bool has_list(const std::vector<DecodePlan::Entry>& entries) {
  return std::any_of(entries.begin(), entries.end(), [](const auto& e) { return e.list; });
}

// Feature-major keys of a group. Without lists and bad records `made` is it already.
DecodedGroup assemble(const std::vector<DecodePlan::Entry>& entries, HeapArray<std::uint64_t> made,
                      const FeatureHandler& h, std::size_t size) {
  DecodedGroup group;
  std::size_t total = 0;
  group.feature_starts.push_back(0);
  for (const auto& e : entries) {
    total += e.list ? h.lists[e.index].size() : size;
    if (total > UINT32_MAX) throw std::length_error("a batch holds more than 2^32 occurrences: take fewer records");
    group.feature_starts.push_back(static_cast<std::uint32_t>(total));
    group.lists.push_back(e.list ? static_cast<std::int64_t>(e.index) : -1);
  }
  if (total == made.size && !has_list(entries)) {
    group.keys = std::move(made);
    return group;
  }
  group.keys = HeapArray<std::uint64_t>::zeroed(total);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto& e = entries[i];
    const std::uint64_t* from = e.list ? h.lists[e.index].data() : h.columns[e.index];
    std::copy_n(from, group.feature_starts[i + 1] - group.feature_starts[i], group.keys.begin() + group.feature_starts[i]);
  }
  return group;
}

}  // namespace

std::int64_t time_part(std::int64_t time_ms, TimePart part) {
  constexpr std::int64_t kHour = 3'600'000, kDay = 24 * kHour;
  const std::int64_t within = (time_ms % kDay + kDay) % kDay;  // of the day; any 64-bit time will do
  const std::int64_t day = time_ms / kDay - (time_ms % kDay < 0);
  const std::int64_t hour = within / kHour;
  const std::int64_t weekday = (day % 7 + 7 + 3) % 7;  // 1 January 1970 was a Thursday
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
  const auto column = [&](std::uint32_t c) { demand(c < columns, "a key column is out of range"); };
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
                             std::span<const std::int32_t> which, std::span<const std::uint8_t> data,
                             std::span<const std::int64_t> ends, std::span<const std::int64_t> times_ms, bool serving) {
  const BytesView view(data, ends);
  const std::size_t n = view.size();
  demand(times_ms.size() == n, "a time for each record");
  demand(which.empty() || which.size() == n, "a program for each record");
  for (const auto w : which) demand(w >= 0 && static_cast<std::size_t>(w) < programs.size(), "no such program");
  demand(!programs.empty() || n == 0, "no program");

  FeatureHandler h;
  h.plan = &plan;
  h.stride = n;
  h.columns.assign(plan.columns, nullptr);
  h.lists.resize(plan.list_max.size());
  h.list_starts.assign(plan.list_max.size(), 0);
  std::vector<HeapArray<std::uint64_t>> made;  // one a group, its single features one after the other; then segments
  for (const auto& entries : plan.groups) {
    const auto singles = static_cast<std::size_t>(std::count_if(entries.begin(), entries.end(), [](const auto& e) { return !e.list; }));
    made.push_back(HeapArray<std::uint64_t>::zeroed(singles * n));
    std::uint64_t* next = made.back().begin();
    for (const auto& e : entries) {
      if (e.list) continue;
      h.columns[e.index] = next;
      next += n;
    }
  }
  for (const auto c : plan.segments) {
    made.push_back(HeapArray<std::uint64_t>::zeroed(n));
    h.columns[c] = made.back().begin();
  }
  for (const auto* column : h.columns) demand(column || n == 0, "a key column belongs to no group");

  DecodedBatch out;
  out.dense = HeapArray<float>::filled(n * plan.log1p.size(), kMissing);
  out.served = HeapArray<float>::filled(n * plan.served, kMissing);
  h.dense = out.dense.begin();
  h.served = out.served.begin();
  for (std::size_t l = 0; l < h.lists.size(); ++l) out.list_ends.push_back(HeapArray<std::uint32_t>::zeroed(n));

  std::vector<std::int64_t> times;
  const std::uint8_t* const buffer_end = data.data() + data.size();
  std::vector<Walker<FeatureHandler>> walkers;
  for (const auto* program : programs) walkers.emplace_back(*program, h, buffer_end);
  for (std::size_t i = 0; i < n; ++i) {
    const auto w = which.empty() ? 0 : static_cast<std::size_t>(which[i]);
    h.words = programs[w]->words().data();
    h.begin_record();
    if (!walkers[w].walk(data.data() + view.start(i), data.data() + view.end(i))) {
      out.bad.push_back({static_cast<std::int64_t>(i), static_cast<std::int64_t>(w), walkers[w].failure()});
      h.undo_record();
      continue;
    }
    for (std::size_t l = 0; l < h.lists.size(); ++l) {
      out.list_ends[l].begin()[h.row] = static_cast<std::uint32_t>(h.lists[l].size());
    }
    if (!plan.times.empty()) times.push_back(times_ms[i]);
    ++h.row;
  }
  out.size = h.row;
  fill_derived(plan, h, times, out.size, serving);
  log1p_columns(out.dense.begin(), out.size, plan.log1p);

  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    out.groups.push_back(assemble(plan.groups[g], std::move(made[g]), h, out.size));
  }
  for (std::size_t s = 0; s < plan.segments.size(); ++s) {
    out.segments.push_back(std::move(made[plan.groups.size() + s]));
    out.segments.back().size = out.size;
  }
  for (auto& list_ends : out.list_ends) list_ends.size = out.size;
  out.dense.size = out.size * plan.log1p.size();
  for (std::uint32_t l = 1; l < plan.served && out.size < n; ++l) {
    std::copy_n(h.served + l * n, out.size, h.served + l * out.size);
  }
  out.served.size = out.size * plan.served;
  return out;
}

}  // namespace freshet
