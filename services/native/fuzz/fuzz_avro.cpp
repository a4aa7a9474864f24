// Avro records of hostile bytes: checked, decoded to features, extracted as events; the three must agree. Read as they
// were written, and as another schema has them.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "../tests/avro_fixture.hpp"
#include "freshet/avro_validate.hpp"

using namespace freshet;

std::vector<std::vector<uint8_t>> fuzz_seeds();
std::vector<std::vector<uint8_t>> fuzz_seeds() { return {fixture::record(), fixture::resolved_record()}; }

namespace {

void demand(bool ok) {
  if (!ok) std::abort();
}

void read(const Program& features, const Program& events, const std::vector<uint8_t>& good, const uint8_t* data,
          size_t size) {
  static const DecodePlan plan = fixture::plan();
  static const EventPlan event_plan = fixture::event_plan();
  // An exact copy, so that a sanitizer sees one byte too far; and a good record after it, which must stay readable.
  std::vector<uint8_t> bytes(data, data + size);
  bytes.insert(bytes.end(), good.begin(), good.end());
  bytes.shrink_to_fit();
  const std::vector<int64_t> ends{static_cast<int64_t>(size), static_cast<int64_t>(bytes.size())};
  const std::vector<int64_t> times{0, 1};

  const auto refused = validate_avro(features, bytes, ends, false);
  const Program* programs[] = {&features};
  const auto decoded = decode_features(plan, programs, {}, bytes, ends, times, true);
  demand(decoded.size + decoded.bad.size() == 2);
  // At the end of the buffer the record is not read by steps: the outcome must be the same.
  const std::vector<uint8_t> tight(data, data + size);
  const auto alone = decode_features(plan, programs, {}, tight, {ends.data(), 1}, {times.data(), 1}, true);
  demand(alone.size + 1 == decoded.size || (alone.bad.size() == 1 && decoded.bad.size() == 1));
  for (size_t g = 0; g < alone.groups.size() && alone.size; ++g) {
    const auto &a = alone.groups[g], &d = decoded.groups[g];
    for (size_t f = 0; f + 1 < a.feature_starts.size(); ++f) {
      for (auto i = a.feature_starts[f]; i < a.feature_starts[f + 1]; ++i) {
        demand(a.keys.data[i] == d.keys.data[d.feature_starts[f] + i - a.feature_starts[f]]);
      }
    }
  }
  for (size_t i = 0; i < alone.dense.size; ++i) {
    demand(std::memcmp(&alone.dense.data[i], &decoded.dense.data[i], sizeof(float)) == 0);
  }
  demand(decoded.bad.size() <= refused.size());  // the check is stricter: it requires UTF-8, and walks skipped fields
  const auto extracted = extract_events(event_plan, events, bytes, ends, false);
  demand(extracted.events.size() + extracted.bad.size() == 2);
  demand(!extracted.events.empty() && extracted.events.back() == 1);
  int64_t first = 0, last = 0;
  for (size_t m = 0; m < extracted.times_ms.size() && extracted.event_index[m] == 0; ++m) {
    first = std::min(first, extracted.times_ms[m]);
    last = std::max(last, extracted.times_ms[m]);
  }
  const bool taken = extracted.events.size() == 2;
  demand(is_readable_event(event_plan, events, tight, last) == (taken && first == 0));
  demand(last == 0 || !is_readable_event(event_plan, events, tight, last - 1));
  std::vector<int64_t> spans;
  for (const auto& row : extracted.spans) spans.insert(spans.end(), row.begin(), row.end());
  (void)splice(bytes, spans);
  (void)extract_events(event_plan, events, bytes, ends, true);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using fixture::For;
  static const Program features = fixture::builder(For::kFeatures).build(),
                       events = fixture::builder(For::kEvents).build();
  static const Program resolved_features = fixture::resolved_builder(For::kFeatures).build();
  static const Program resolved_events = fixture::resolved_builder(For::kEvents).build();
  static const std::vector<uint8_t> good = fixture::record(), resolved = fixture::resolved_record();
  read(features, events, good, data, size);
  read(resolved_features, resolved_events, resolved, data, size);
  return 0;
}
