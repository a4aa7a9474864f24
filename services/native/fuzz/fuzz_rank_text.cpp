// Rank requests of hostile bytes: the event of an accepted request is Avro of the schema, and its texts are JSON.
#include <cstdlib>

#include "../tests/avro_fixture.hpp"
#include "freshet/avro_validate.hpp"
#include "freshet/json_parse.hpp"
#include "freshet/rank_text.hpp"

using namespace freshet;

namespace {

const char* const kRequests[] = {
    R"({"context": {"name": "n\u00e4", "price": 2.5e-3, "kind": "B", "tags": ["x", ""], "stats": {"clicks": 9}, "any": "text",
 "raw": "abc", "ok": true, "blob": "\u00ff"}, "candidates": [{"item": 1, "w": 0.5}, {"item": 2, "w": 1, "pos": 3}], "k": 1})",
    R"({"request_id": 7, "dry_run": false, "explain": false, "candidates": [{"w": 0, "item": 5}], "context": {"id": 9, "name": "",
 "kind": "A", "tags": [], "stats": {}, "any": null, "raw": "\u0000bc", "ok": false, "count": -1, "blob": ""}})",
    R"({"candidates": [{}]})",
};

bool is_json(const std::string& text) {
  JsonParser parser;
  size_t position = 0;
  const std::span<const uint8_t> bytes{reinterpret_cast<const uint8_t*>(text.data()), text.size()};
  return !parser.parse(bytes, position).expected && position == text.size();
}

}  // namespace

std::vector<std::vector<uint8_t>> fuzz_seeds();
std::vector<std::vector<uint8_t>> fuzz_seeds() {
  std::vector<std::vector<uint8_t>> seeds;
  for (const std::string request : kRequests) seeds.emplace_back(request.begin(), request.end());
  return seeds;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const WriterSchema schema(fixture::builder(fixture::For::kWriting).build());
  static const Program reader = fixture::builder(fixture::For::kNothing).build();
  static const RankRules rules{"items", "id", "count", "told", {"pos", "w"}, {"\"click\"", "\"buy\""}, 50};
  static const EventPlan event_plan = fixture::event_plan();
  static const Program events = fixture::builder(fixture::For::kEvents).build();
  const LoggedRules logged{schema, event_plan, events, int64_t{1} << 60};
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto checked = RankText::read(rules, schema, std::string(text), "12", "34", &logged);
  const auto made = RankText::read(rules, schema, std::string(reinterpret_cast<const char*>(data), size), "12", "34");
  if (checked && !made) std::abort();  // a check only ever takes less
  if (!made) return 0;
  if (made->k < 1 || made->k > made->candidates || made->record.ends.size() != 1) std::abort();
  if (!validate_avro(reader, made->record.data, made->record.ends, false).empty()) std::abort();
  std::vector<float> scores, predictions(2 * made->candidates, 0.25f);
  for (size_t i = 0; i < made->candidates; ++i) scores.push_back(i % 3 == 1 ? 0.0f / 0.0f : static_cast<float>(i % 5));
  const auto chosen = best(scores, made->k);
  const std::vector<float> propensity(chosen.size(), 1.0f);
  const RankOrder order{chosen, scores, predictions, propensity};
  if (chosen.size() != made->k || !is_json(made->items(rules, order)) || !is_json(made->served(rules, order, 3, true)))
    std::abort();
  return 0;
}
