#include "freshet/feature_requests.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "freshet/avro_walk.hpp"
#include "freshet/bytes_column.hpp"
#include "freshet/event_time.hpp"
#include "freshet/hash.hpp"

namespace freshet {
namespace {

constexpr float kMissing = std::numeric_limits<float>::quiet_NaN();

void demand(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("request plan: ") + what);
}

// The fields of a request, or of one of its candidates, beside features.
struct Envelope {
  std::vector<uint8_t> parts;
  int64_t time = kNoTime;
  void reset(size_t count) {
    parts.assign(count, 0);
    time = kNoTime;
  }
};

// Writes the walker's values into row `row` of the columns of this side of the array.
struct RequestHandler {
  static constexpr bool kExplodes = true;

  const RequestPlan* plan;
  const Program* program;
  std::vector<std::vector<uint64_t>> columns;  // (R,) or (B,)
  std::vector<std::vector<uint64_t>> lists;
  std::vector<std::vector<uint32_t>> list_ends;
  std::vector<size_t> list_starts;   // of the elements of the row at hand
  std::vector<float> request_dense;  // (R, D)
  float* dense = nullptr;            // (B, D)
  std::vector<int64_t> times;        // (R,) or (B,)
  std::vector<uint32_t> request_of;  // (B,)
  Envelope request, element;
  size_t requests = 0, candidates = 0;  // rows so far
  size_t limit = 0;                     // candidates that there may be
  bool inside = false;                  // whether a candidate is being read
  Why element_why = Why::kNone;         // of the first candidate with a missing field

  size_t row() const { return inside ? candidates : requests; }
  Envelope& here() { return inside ? element : request; }

  void number(const Sink& s, double v) {
    if (static_cast<FeatureSink>(s.kind) == FeatureSink::kDense) {
      const auto f = static_cast<float>(v);
      (inside ? dense : request_dense.data())[row() * plan->decode.log1p.size() + s.slot] =
          std::isfinite(f) ? f : kMissing;
    } else if (static_cast<FeatureSink>(s.kind) == FeatureSink::kBucket && v == v) {
      int64_t edges = 0;
      for (uint32_t i = 0; i < s.words_size; ++i)
        edges += std::bit_cast<double>(program->words()[s.words_begin + i]) <= v;
      columns[s.slot][row()] = key_of_int(edges, s.salt);
    }
  }

  void key(const Sink& s, uint64_t k) {
    if (static_cast<FeatureSink>(s.kind) == FeatureSink::kKey) {
      columns[s.slot][row()] = k;
    } else if (k != kAbsentKey && lists[s.slot].size() - list_starts[s.slot] < plan->decode.list_max[s.slot]) {
      lists[s.slot].push_back(k);
    }
  }

  static bool is_key(const Sink& s) { return s.kind <= static_cast<uint32_t>(FeatureSink::kList); }
  // Whether the sink is one of the envelope's; a part of the key is then noted.
  bool is_envelope(const Sink& s) {
    if (static_cast<RequestSink>(s.kind) == RequestSink::kPart) here().parts[s.slot] = 1;
    return s.kind >= static_cast<uint32_t>(RequestSink::kPart);
  }
  static bool is_time(const Sink& s) { return static_cast<RequestSink>(s.kind) == RequestSink::kTime; }
  static TimeUnit unit(const Sink& s) { return static_cast<TimeUnit>(s.slot); }

  void on_int(const Sink& s, int64_t v) {
    if (is_key(s)) return key(s, key_of_int(v, s.salt));
    if (!is_envelope(s)) return number(s, static_cast<double>(v));
    if (is_time(s)) here().time = time_of_int(unit(s), v);
  }
  void on_double(const Sink& s, double v) {
    if (is_key(s)) return key(s, key_of_double(v, s.salt));
    if (!is_envelope(s)) return number(s, v);
    if (is_time(s)) here().time = time_of_double(unit(s), v);
  }
  void on_bytes(const Sink& s, const uint8_t* p, size_t n) {
    if (is_key(s)) return key(s, key_of_bytes(p, n, s.salt));
    if (is_envelope(s) && is_time(s)) here().time = time_of_text({reinterpret_cast<const char*>(p), n});
  }
  void on_enum(const Sink& s, uint32_t symbol) {
    if (is_key(s) && symbol < s.words_size) return key(s, program->words()[s.words_begin + symbol]);
    is_envelope(s);
  }

  bool takes_elements(int64_t) { return true; }  // as many as `limit`, which the request's reader bounds
  void elements_begin(const uint8_t*) {}
  void elements_end(const uint8_t*) {}
  void element_begin(const uint8_t*) {
    if (candidates == limit) throw std::invalid_argument("a request holds more candidates than it was said to");
    begin(plan->list_in_element, true);
  }
  void element_end(const uint8_t*) { end(plan->list_in_element, true); }

  void begin(const std::vector<uint8_t>& list_side, bool is_element) {
    inside = is_element;
    here().reset(plan->part_in_element.size());
    for (size_t l = 0; l < lists.size(); ++l)
      if (static_cast<bool>(list_side[l]) == is_element) list_starts[l] = lists[l].size();
  }

  void end(const std::vector<uint8_t>& list_side, bool is_element) {
    for (size_t l = 0; l < lists.size(); ++l)
      if (static_cast<bool>(list_side[l]) == is_element) list_ends[l].push_back(static_cast<uint32_t>(lists[l].size()));
    if (static_cast<bool>(plan->time_in_element) == is_element) times.push_back(here().time);
    if (element_why == Why::kNone) element_why = lacks(is_element);
    if (is_element) {
      request_of.push_back(static_cast<uint32_t>(requests));
      ++candidates;
      inside = false;
    }
  }

  // What this side of the envelope lacks.
  Why lacks(bool is_element) {
    for (size_t k = 0; k < plan->part_in_element.size(); ++k)
      if (static_cast<bool>(plan->part_in_element[k]) == is_element && !here().parts[k]) return Why::kMissingKey;
    return static_cast<bool>(plan->time_in_element) == is_element ? why_of_time(here().time) : Why::kNone;
  }
};

void prepare(RequestHandler& h, const RequestPlan& plan, size_t requests, size_t candidates) {
  for (const auto in_element : plan.column_in_element)
    h.columns.emplace_back(in_element ? candidates : requests, kAbsentKey);
  h.lists.resize(plan.decode.list_max.size());
  h.list_ends.resize(h.lists.size());
  h.list_starts.assign(h.lists.size(), 0);
  h.request_dense.assign(requests * plan.decode.log1p.size(), kMissing);
  h.request_of.reserve(candidates);
  h.times.reserve(plan.time_in_element ? candidates : requests);
}

// Numbers of requests go to their candidates' rows; constants to all.
void fill_dense(const RequestPlan& plan, RequestHandler& h) {
  const size_t width = plan.decode.log1p.size();
  for (size_t d = 0; d < width; ++d) {
    if (plan.dense_in_element[d]) continue;
    for (size_t b = 0; b < h.candidates; ++b) h.dense[b * width + d] = h.request_dense[h.request_of[b] * width + d];
  }
  for (const auto& [column, value] : plan.decode.constant_dense)
    for (size_t b = 0; b < h.candidates; ++b) h.dense[b * width + column] = value;
}

void fill_keys(const RequestPlan& plan, RequestHandler& h) {
  for (const auto& t : plan.decode.times) {
    auto& out = h.columns[t.column];
    for (size_t r = 0; r < out.size(); ++r) out[r] = key_of_int(time_part(h.times[r], t.part), t.salt);
  }
  for (const auto& [column, key] : plan.decode.constant_keys)
    std::fill(h.columns[column].begin(), h.columns[column].end(), key);
  std::vector<uint64_t> parts;
  for (const auto& cross : plan.decode.crosses) {
    auto& out = h.columns[cross.column];
    parts.resize(cross.parts.size());
    for (size_t r = 0; r < out.size(); ++r) {
      for (size_t k = 0; k < parts.size(); ++k) {
        const bool same = plan.column_in_element[cross.parts[k]] == plan.column_in_element[cross.column];
        parts[k] = h.columns[cross.parts[k]][same ? r : h.request_of[r]];
      }
      out[r] = key_of_cross(parts.data(), parts.size(), cross.seed);
    }
  }
}

DecodedGroup assemble(const std::vector<DecodePlan::Entry>& entries, const RequestHandler& h) {
  DecodedGroup group;
  const auto keys_of = [&](const DecodePlan::Entry& e) -> const auto& {
    return e.list ? h.lists[e.index] : h.columns[e.index];
  };
  size_t total = 0;
  group.feature_starts.push_back(0);
  for (const auto& e : entries) {
    total += keys_of(e).size();
    if (total > UINT32_MAX) throw std::length_error("a batch holds more than 2^32 occurrences: take fewer requests");
    group.feature_starts.push_back(static_cast<uint32_t>(total));
    group.lists.push_back(e.list ? static_cast<int64_t>(e.index) : -1);
  }
  group.keys = HeapArray<uint64_t>::zeroed(total);
  uint64_t* next = group.keys.begin();
  for (const auto& e : entries) next = std::copy(keys_of(e).begin(), keys_of(e).end(), next);
  return group;
}

}  // namespace

void RequestPlan::check() const {
  decode.check();
  demand(column_in_element.size() == decode.columns && list_in_element.size() == decode.list_max.size() &&
             dense_in_element.size() == decode.log1p.size(),
         "each column and list has a side");
  for (const auto& t : decode.times)
    demand(column_in_element[t.column] == time_in_element, "a part of the time is where the time is");
  for (const auto& cross : decode.crosses)
    for (const auto p : cross.parts)
      demand(column_in_element[cross.column] || !column_in_element[p],
             "a cross of a candidate's values is the candidate's");
}

void RequestPlan::check(const Program& program) const {
  const auto& nodes = program.nodes();
  const auto array = std::find_if(nodes.begin(), nodes.end(), [](const Node& n) { return n.explode; });
  demand((array != nodes.end()) == explode, "one array is exploded, or none");
  for (size_t i = 0; i < nodes.size(); ++i) {
    const auto at = nodes.begin() + static_cast<ptrdiff_t>(i);
    const bool within = !explode || (at >= array && i < array->end);
    for (uint32_t k = nodes[i].sink_begin; k < nodes[i].sink_end; ++k) {
      const Sink& s = program.sinks()[k];
      const auto side = [&](const std::vector<uint8_t>& sides) {
        demand(s.slot < sides.size(), "a sink's slot is out of range");
        demand(static_cast<bool>(sides[s.slot]) == within,
               "a value stands on the other side of the array than its column");
      };
      switch (s.kind) {
        case static_cast<uint32_t>(FeatureSink::kKey):
        case static_cast<uint32_t>(FeatureSink::kBucket):
          side(column_in_element);
          break;
        case static_cast<uint32_t>(FeatureSink::kList):
          side(list_in_element);
          break;
        case static_cast<uint32_t>(FeatureSink::kDense):
          side(dense_in_element);
          break;
        case static_cast<uint32_t>(RequestSink::kPart):
          side(part_in_element);
          break;
        case static_cast<uint32_t>(RequestSink::kTime):
          demand(s.slot <= static_cast<uint32_t>(TimeUnit::kDays), "no such unit of time");
          demand(time_in_element == within, "the time stands on the other side of the array");
          break;
        default:
          demand(false, "no such sink");
      }
    }
  }
}

DecodedRequests decode_requests(const RequestPlan& plan, const Program& program, std::span<const uint8_t> data,
                                std::span<const int64_t> ends, std::span<const uint32_t> counts) {
  const BytesView view(data, ends);
  const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
  if (view.size() != (plan.explode ? counts.size() : total))
    throw std::invalid_argument("records and counts of candidates do not agree");
  DecodedRequests out;
  out.dense = HeapArray<float>::filled(total * plan.decode.log1p.size(), kMissing);
  RequestHandler h;
  h.plan = &plan;
  h.program = &program;
  h.dense = out.dense.begin();
  prepare(h, plan, counts.size(), total);
  Walker<RequestHandler> walker(program, h, data.data() + data.size());
  size_t records = plan.explode ? 1 : counts.empty() ? 0 : counts[0];  // of the request at hand that are to come
  for (size_t i = 0; i < view.size(); ++i, --records) {
    while (records == 0) records = plan.explode ? (++h.requests, 1) : counts[++h.requests];
    h.element_why = Why::kNone;
    const size_t first = h.candidates;
    if (plan.explode) h.limit = first + counts[i];
    h.begin(plan.list_in_element, !plan.explode);
    if (!walker.walk(data.data() + view.start(i), data.data() + view.end(i))) {
      out.bad.push_back({static_cast<int64_t>(i), 0, walker.failure()});
      h.candidates = first;  // its output is never read
      h.inside = false;
    } else {
      h.end(plan.list_in_element, !plan.explode);
      if (h.element_why != Why::kNone)
        out.bad.push_back({static_cast<int64_t>(i), 0, {h.element_why, 0, view.end(i) - view.start(i)}});
      else if (plan.explode && out.bad.empty() && h.candidates != h.limit)
        throw std::invalid_argument("a request holds fewer candidates than it was said to");
    }
  }
  if (!out.bad.empty()) return out;
  out.size = total;
  fill_dense(plan, h);
  fill_keys(plan, h);
  log1p_columns(out.dense.begin(), out.size, plan.decode.log1p);
  for (const auto& entries : plan.decode.groups) out.groups.push_back(assemble(entries, h));
  for (const auto& list_ends : h.list_ends) {
    out.list_ends.push_back(HeapArray<uint32_t>::zeroed(list_ends.size()));
    std::copy(list_ends.begin(), list_ends.end(), out.list_ends.back().begin());
  }
  return out;
}

}  // namespace freshet
