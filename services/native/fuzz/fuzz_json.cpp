// JSON of hostile bytes: the output must be Avro of the schema, whatever else was refused.
#include <algorithm>
#include <cstdlib>

#include "../tests/avro_fixture.hpp"
#include "freshet/avro_validate.hpp"
#include "freshet/json_avro.hpp"

using namespace freshet;

namespace {

const char* const kEvents[] = {
    R"({"id": -5, "name": "n\u00e4\ud83d\ude00\n", "price": 2.5e-3, "kind": "B", "tags": ["x", ""], "stats": {"clicks": 9},
 "any": "text", "raw": "abc", "ok": true, "count": 7, "blob": "\u00ff", "items": [{"item": 1, "w": 0.5}]})",
    R"([{"id": 1, "name": "", "kind": "A", "tags": [], "stats": {}, "any": null, "raw": "\u0000bc", "ok": false,
 "count": -1, "blob": "", "items": []}, {"id": 2}])",
    "{\"id\": 1}\n{\"id\": 2}\n",
    R"([{"id": 1, "id": 2}, {"name": "\ud83d"}, {"id": NaN}, {"a": {"b": 1, "b": 2}}, 1e999, [[]]] {"id": -0} {"id": 1},)",
    "\xEF\xBB\xBF{\"id\": 1, \"name\": \"torn\n{\"id\": 2}\r\n[{\"id\": 3}, {'id': 4}]\n",
};

}  // namespace

std::vector<std::vector<uint8_t>> fuzz_seeds();
std::vector<std::vector<uint8_t>> fuzz_seeds() {
  std::vector<std::vector<uint8_t>> seeds;
  for (const std::string event : kEvents) seeds.emplace_back(event.begin(), event.end());
  return seeds;
}

namespace {

// Events of a body lie within it, one after the other; a valid one is the same event when it is sent alone.
void check_body(const WriterSchema& schema, const std::vector<uint8_t>& text, const JsonOptions& options) {
  constexpr int64_t kMost = 1000;
  const Transcoded made = transcode_body(schema, text, options, kMost);
  const auto total = static_cast<size_t>(made.total);
  if (made.total > kMost + 1 || made.begins.size() != total || made.ends.size() != total) std::abort();
  int64_t at = 0;
  for (size_t i = 0; i < total; ++i) {
    if (made.begins[i] < at || made.ends[i] <= made.begins[i]) std::abort();
    at = made.ends[i];
  }
  if (at > static_cast<int64_t>(text.size())) std::abort();
  const BytesView records(made.records.data, made.records.ends);
  for (size_t k = 0; k < made.events.size(); ++k) {
    const auto i = static_cast<size_t>(made.events[k]);
    const std::vector<uint8_t> alone(text.begin() + made.begins[i], text.begin() + made.ends[i]);
    const std::vector<int64_t> end{static_cast<int64_t>(alone.size())};
    const Transcoded again = transcode_each(schema, alone, end, options);
    if (again.events.size() != 1) std::abort();
    if (!std::equal(again.records.data.begin(), again.records.data.end(), records[k].begin(), records[k].end()))
      std::abort();
  }
  const std::span<const uint8_t> body(text);
  const TranscodedBodies whole = transcode_bodies(schema, std::span(&body, 1), options, kMost);
  const bool good = made.bad.empty() && made.total > 0 && made.total <= kMost;
  if (whole.counts[0] != (good ? made.total : -1)) std::abort();
  if (good && whole.records.data != made.records.data) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const WriterSchema schema(fixture::builder(fixture::For::kWriting).build());
  static const Program reader = fixture::builder(fixture::For::kNothing).build();
  const std::vector<uint8_t> text(data, data + size);
  const std::vector<int64_t> ends{static_cast<int64_t>(size)};
  for (const bool ignore_unknown : {false, true}) {
    const JsonOptions options{ignore_unknown, {}};
    check_body(schema, text, options);
    for (const auto& made :
         {transcode_body(schema, text, options, 1000), transcode_each(schema, text, ends, options)}) {
      if (made.events.size() + made.bad.size() != static_cast<size_t>(made.total)) std::abort();
      if (made.records.ends.size() != made.events.size()) std::abort();
      if (!validate_avro(reader, made.records.data, made.records.ends, false).empty()) std::abort();
    }
  }
  return 0;
}
