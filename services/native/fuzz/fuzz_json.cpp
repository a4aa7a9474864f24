// JSON of hostile bytes: what becomes Avro must be Avro of the schema, whatever was refused beside it.
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
};

}  // namespace

std::vector<std::vector<std::uint8_t>> fuzz_seeds();
std::vector<std::vector<std::uint8_t>> fuzz_seeds() {
  std::vector<std::vector<std::uint8_t>> seeds;
  for (const std::string event : kEvents) seeds.emplace_back(event.begin(), event.end());
  return seeds;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const WriterSchema schema(fixture::builder(fixture::For::kWriting).build());
  static const Program reader = fixture::builder(fixture::For::kNothing).build();
  const std::vector<std::uint8_t> text(data, data + size);
  const std::vector<std::int64_t> ends{static_cast<std::int64_t>(size)};
  for (const bool ignore_unknown : {false, true}) {
    const JsonOptions options{ignore_unknown, {}};
    for (const auto& made : {transcode_body(schema, text, options, 1000), transcode_each(schema, text, ends, options)}) {
      if (made.events.size() + made.bad.size() != static_cast<std::size_t>(made.total)) std::abort();
      if (made.records.ends.size() != made.events.size()) std::abort();
      if (!validate_avro(reader, made.records.data, made.records.ends, false).empty()) std::abort();
    }
  }
  return 0;
}
