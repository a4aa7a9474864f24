#include "freshet/event_intake.hpp"

#include <charconv>
#include <cstring>
#include <stdexcept>

#include "freshet/event_time.hpp"
#include "freshet/murmur.hpp"

namespace freshet {
namespace {

constexpr size_t kFrame = 5;
constexpr size_t kLength = 4;

using Text = std::span<const uint8_t>;

uint32_t big_endian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | uint32_t{p[3]};
}

bool has_frame(Text record, uint32_t schema_id) {
  return record.size() >= kFrame && record[0] == 0 && big_endian(record.data() + 1) == schema_id;
}

// Append a body's records to `out`, and how many there were; -1 if they are not of this schema, or not cut so.
int64_t cut(Text body, uint32_t schema_id, bool lengths, int64_t max_events, BytesColumn& out) {
  int64_t count = 0;
  while (count == 0 || !body.empty()) {
    size_t size = body.size();
    if (lengths) {
      if (size < kLength) return -1;
      size = big_endian(body.data());
      body = body.subspan(kLength);
      if (size > body.size()) return -1;
    }
    if (++count > max_events || !has_frame(body.first(size), schema_id)) return -1;
    out.append(body.data(), size);
    out.close();
    body = body.subspan(size);
  }
  return count;
}

// (N,) 1 for an event that the log may not accept: it is unreadable, or its time is implausible and needs another
// check.
std::vector<uint8_t> refused(const ExtractedEvents& events, size_t n, int64_t latest_ms) {
  std::vector<uint8_t> bad(n, 0);
  for (const auto& b : events.bad) bad[static_cast<size_t>(b.index)] = 1;
  for (size_t m = 0; m < events.times_ms.size(); ++m) {
    if (is_implausible_time(events.times_ms[m], latest_ms)) bad[static_cast<size_t>(events.event_index[m])] = 1;
  }
  return bad;
}

// A column whose rows are written out of order, partition by partition.
class Scattered {
 public:
  // `bytes` (P,) of each partition's rows together; `rows` in all.
  Scattered(BytesColumn& out, const std::vector<size_t>& bytes, size_t rows) : out_(out), next_(bytes.size()) {
    size_t total = 0;
    for (size_t p = 0; p < bytes.size(); ++p) {
      next_[p] = total;
      total += bytes[p];
    }
    out_.data.resize(total);
    out_.ends.resize(rows);
  }

  void put(size_t partition, size_t row, Text value) {
    if (!value.empty()) std::memcpy(out_.data.data() + next_[partition], value.data(), value.size());
    next_[partition] += value.size();
    out_.ends[row] = static_cast<int64_t>(next_[partition]);
  }

 private:
  BytesColumn& out_;
  std::vector<size_t> next_;  // (P,) where the next row of each goes
};

// `encoded` (E,) framed records of bodies with `counts`; `values` (E,) the values for the log.
Intake settle(const IntakeRules& rules, const BytesColumn& encoded, std::vector<int64_t> counts,
              std::span<const Text> values) {
  const auto events = extract_events(rules.plan, rules.program, encoded.data, encoded.ends, true);
  const auto bad = refused(events, encoded.ends.size(), rules.latest_ms);
  const BytesView keys(events.request_keys.data, events.request_keys.ends);
  const auto partitions = static_cast<size_t>(rules.partitions);
  Intake out;
  out.starts.assign(partitions + 1, 0);
  std::vector<size_t> value_bytes(partitions, 0), key_bytes(partitions, 0);
  std::vector<std::pair<size_t, size_t>> taken;  // (N,) place in `values` and in `keys`
  size_t event = 0, readable = 0;
  for (auto& count : counts) {
    if (count < 0) continue;
    const size_t end = event + static_cast<size_t>(count);
    bool whole = true;
    for (size_t e = event; e < end; ++e) whole = whole && !bad[e];
    for (; event < end; ++event) {
      const bool read = readable < events.events.size() && events.events[readable] == static_cast<int64_t>(event);
      if (whole) {
        const auto key = keys[readable];
        const auto p = (murmur2(key.data(), key.size()) & 0x7fffffff) % static_cast<uint32_t>(partitions);
        out.partitions.push_back(static_cast<int32_t>(p));
        out.positions.push_back(out.starts[p + 1]++);
        value_bytes[p] += values[event].size();
        key_bytes[p] += key.size();
        taken.emplace_back(event, readable);
      }
      readable += read;
    }
    if (!whole) count = -1;
  }
  for (size_t p = 0; p < partitions; ++p) out.starts[p + 1] += out.starts[p];
  Scattered records(out.records, value_bytes, taken.size()), ids(out.keys, key_bytes, taken.size());
  for (size_t i = 0; i < taken.size(); ++i) {
    const auto p = static_cast<size_t>(out.partitions[i]);
    const auto row = static_cast<size_t>(out.starts[p] + out.positions[i]);
    records.put(p, row, values[taken[i].first]);
    ids.put(p, row, keys[taken[i].second]);
  }
  out.counts = std::move(counts);
  return out;
}

std::vector<Text> rows_of(const BytesColumn& column) {
  const BytesView view(column.data, column.ends);
  std::vector<Text> rows;
  rows.reserve(view.size());
  for (size_t i = 0; i < view.size(); ++i) rows.push_back(view[i]);
  return rows;
}

}  // namespace

Intake intake_json(const IntakeRules& rules, const WriterSchema& schema, Bodies bodies, const JsonOptions& options,
                   bool keep_text) {
  auto made = transcode_bodies(schema, bodies, options, rules.max_events);
  const auto values = keep_text ? std::move(made.texts) : rows_of(made.records);
  return settle(rules, made.records, std::move(made.counts), values);
}

Intake intake_avro(const IntakeRules& rules, uint32_t schema_id, Bodies bodies, bool lengths) {
  BytesColumn records;
  std::vector<int64_t> counts;
  for (const auto body : bodies) {
    const size_t before = records.ends.size();
    counts.push_back(cut(body, schema_id, lengths, rules.max_events, records));
    if (counts.back() < 0) {
      records.ends.resize(before);
      records.rollback();
    }
  }
  return settle(rules, records, std::move(counts), rows_of(records));
}

BytesColumn write_acks(std::string_view topic, std::span<const int64_t> counts, std::span<const int32_t> partitions,
                       std::span<const int64_t> positions, std::span<const int64_t> firsts) {
  BytesColumn out;
  out.data.reserve(32 * counts.size() + (64 + topic.size()) * partitions.size());
  const auto text = [&](std::string_view s) { out.append(reinterpret_cast<const uint8_t*>(s.data()), s.size()); };
  const auto number = [&](int64_t v) {
    char digits[24];
    text({digits, std::to_chars(digits, digits + sizeof digits, v).ptr});
  };
  size_t event = 0;
  for (const int64_t count : counts) {
    if (count >= 0) {
      text("{\"accepted\":");
      number(count);
      text(",\"acks\":[");
      for (int64_t k = 0; k < count; ++k, ++event) {
        if (event >= partitions.size() || event >= positions.size())
          throw std::invalid_argument("acks: more events than places");
        const auto p = static_cast<size_t>(partitions[event]);
        if (p >= firsts.size()) throw std::invalid_argument("acks: a partition without a first offset");
        text(k ? ",{\"topic\":" : "{\"topic\":");
        text(topic);
        text(",\"partition\":");
        number(partitions[event]);
        text(",\"offset\":");
        number(firsts[p] + positions[event]);
        text("}");
      }
      text("]}");
    }
    out.close();
  }
  return out;
}

}  // namespace freshet
