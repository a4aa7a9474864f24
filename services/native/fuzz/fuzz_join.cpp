// The joiner driven by bytes: any sequence of batches, with spans that may lie, keeps its ledger exact and yields only
// bytes of events.
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "freshet/join.hpp"

namespace {

using namespace freshet::join;

struct Bytes {
  const std::uint8_t* at;
  const std::uint8_t* end;
  std::uint8_t next() { return at == end ? 0 : *at++; }
  std::int64_t small(int range) { return next() % range; }
};

void check_ledger(const Joiner& joiner) {
  std::vector<std::int64_t> counts(joiner.labels() * kLabelCounterCount + kEventCounterCount), pending(joiner.labels());
  joiner.counters(counts);
  joiner.pending(pending);
  const std::int64_t* events = counts.data() + joiner.labels() * kLabelCounterCount;
  for (size_t label = 0; label < joiner.labels(); label++) {
    std::int64_t sum = pending[label];
    for (size_t i = 0; i < kLabelCounterCount; i++) sum += counts[label * kLabelCounterCount + i];
    if (sum != events[0] + events[2] || pending[label] < 0) std::abort();
  }
}

void drain(Joiner& joiner, bool late) {
  const Size size = joiner.ready(late);
  std::vector<std::int64_t> ids(size.samples), times(size.samples), ends(size.samples);
  std::vector<std::uint64_t> requests(size.samples);
  std::vector<float> values(size.samples), weights(size.samples);
  std::vector<std::uint8_t> labels(size.samples), payload(size.bytes);
  std::vector<std::uint32_t> schemas(size.samples);
  std::vector<double> aggregates(late ? 0 : size.samples * joiner.aggregates());
  joiner.take(late, {ids, times, requests, values, weights, labels, schemas, ends, payload, aggregates});
  if (size.samples != 0 && ends.back() != static_cast<std::int64_t>(size.bytes)) std::abort();
  for (const std::uint8_t byte : payload)
    if (byte != 'e') std::abort();  // framing and gaps are 'x'
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes in{data, data + size};
  const std::uint8_t shape = in.next();
  Plan plan{{{in.small(50), -1, false}, {in.small(99), 0, true}}, {{1, Aggregate::kSum}, {1, Aggregate::kLast}},
            in.small(20), (shape & 1) != 0, (shape & 2) != 0, (shape & 4) != 0 ? 0.5 : 1.0, (shape & 8) != 0 ? 2 + (shape >> 4) : 0};
  Joiner joiner(plan);
  std::int64_t watermark = 0, offset = 0;
  std::vector<Outcome> outcomes;
  while (in.at != in.end) {
    const std::uint8_t what = in.next();
    const auto n = static_cast<size_t>(what >> 3);
    outcomes.assign(n, Outcome::kNew);
    std::vector<std::int64_t> offsets(n), times(n);
    std::vector<Key> keys(n), ids(n);
    for (size_t i = 0; i < n; i++) {
      offsets[i] = offset++;
      times[i] = in.small(250);
      keys[i] = {static_cast<std::uint64_t>(in.small(8)), 1};
      ids[i] = {static_cast<std::uint64_t>(in.small(32)), 2};
    }
    if ((what & 7) < 3) {
      std::vector<std::uint8_t> bytes;
      std::vector<std::int64_t> begins, prefixes, suffixes, ends, element_begins, element_ends;
      std::vector<std::uint64_t> requests;
      std::vector<std::uint32_t> schemas, events;
      for (size_t i = 0; i < n; i++) {
        bytes.insert(bytes.end(), 3, 'x');
        begins.push_back(static_cast<std::int64_t>(bytes.size()));
        bytes.insert(bytes.end(), static_cast<size_t>(1 + in.small(9)), 'e');
        const auto end = static_cast<std::int64_t>(bytes.size());
        const std::int64_t lie = in.next() == 255 ? in.next() - 128 : 0;
        prefixes.push_back(begins.back());
        element_begins.push_back(begins.back() + lie);
        element_ends.push_back(end);
        suffixes.push_back(end);
        ends.push_back(end);
        requests.push_back(keys[i].hi / 2);
        schemas.push_back(1);
        events.push_back(static_cast<std::uint32_t>(i));
      }
      try {
        joiner.on_served({bytes, offsets, begins, prefixes, suffixes, ends, requests, schemas, events, keys, times, element_begins, element_ends}, outcomes);
      } catch (const std::invalid_argument&) {
      }
    } else if ((what & 7) == 3) {
      joiner.on_shown({offsets, times, keys}, outcomes);
    } else if ((what & 7) < 6) {
      std::vector<std::uint32_t> masks(n);
      std::vector<double> values(n * 2);
      for (size_t i = 0; i < n; i++) masks[i] = static_cast<std::uint32_t>(in.small(5));
      for (double& value : values) value = static_cast<double>(in.small(7));
      joiner.on_actions({offsets, times, keys, ids, masks, values}, outcomes);
    } else {
      watermark += in.small(60);
      joiner.advance(watermark);
      if (joiner.due(watermark)) std::abort();
      check_ledger(joiner);
      drain(joiner, false);
      drain(joiner, true);
      if (joiner.low(0, offset) > offset) std::abort();
    }
  }
  joiner.advance(100'000);
  check_ledger(joiner);
  if (joiner.ids() != 0 || joiner.waiting() != 0) std::abort();
  joiner.discard();
  return 0;
}
