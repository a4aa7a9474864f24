#include "freshet/rank_text.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "freshet/json_avro.hpp"
#include "freshet/json_parse.hpp"

namespace freshet {
namespace {

std::span<const uint8_t> bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

void put(std::string& out, int64_t v) {
  char digits[24];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, v).ptr);
}

void put(std::string& out, float v) {
  if (!std::isfinite(v)) {
    out.append("null");
    return;
  }
  char digits[32];  // of the double, as JSON readers have no other numbers
  out.append(digits, std::to_chars(digits, digits + sizeof digits, static_cast<double>(v)).ptr);
}

// Members of two objects, one after the other.
void join(std::string& out, std::string_view members) {
  if (!out.empty() && out.back() != '{' && !members.empty()) out.push_back(',');
  out.append(members);
}

std::string member(std::string_view name, std::string_view value) {
  std::string out(1, '"');
  return out.append(name).append("\":").append(value);
}

// The text of an object's members; empty for an empty one.
std::string_view inside(const JsonParser& parser, const JsonNode& object) {
  return object.count ? parser.text(object).substr(1, object.size - 2) : std::string_view{};
}

// Whether a text goes over several lines; of JSON's, only the space between its parts does.
bool has_lines(std::string_view text) { return text.find('\n') != text.npos || text.find('\r') != text.npos; }

// Whether a double holds a number, so that it is neither infinite nor rounded to 0.
bool fits_double(std::string_view number) {
  constexpr size_t surely = 300;  // a number of so many digits and no exponent always fits
  if (number.size() <= surely && number.find_first_of("eE") == number.npos) return true;
  double v = 0;
  return std::from_chars(number.data(), number.data() + number.size(), v).ec == std::errc{} && std::isfinite(v);
}

bool is_integer(std::string_view text) { return text.find_first_of(".eE") == text.npos; }

// The members of the request, each once; null nodes are those that are not there.
struct Members {
  const JsonNode *context = nullptr, *candidates = nullptr, *k = nullptr, *request_id = nullptr, *dry_run = nullptr,
                 *explain = nullptr;

  const JsonNode** of(std::string_view name) {
    if (name == "context") return &context;
    if (name == "candidates") return &candidates;
    if (name == "k") return &k;
    if (name == "request_id") return &request_id;
    if (name == "dry_run") return &dry_run;
    return name == "explain" ? &explain : nullptr;
  }

  bool read(const JsonParser& parser) {
    const auto& nodes = parser.nodes();
    uint32_t key = 1;
    for (uint32_t m = 0; m < nodes[0].count; ++m, key = nodes[key + 1].next) {
      const JsonNode** place = nodes[key].escaped ? nullptr : of(parser.text(nodes[key]));
      if (!place || *place) return false;
      *place = &nodes[key + 1];
    }
    return true;
  }
};

bool is_flag(const JsonNode* node) { return !node || node->kind == JsonKind::kTrue || node->kind == JsonKind::kFalse; }
bool is_true(const JsonNode* node) { return node && node->kind == JsonKind::kTrue; }
bool is_id(const JsonParser& parser, const JsonNode& node) {
  if (node.kind == JsonKind::kString) return !node.escaped;
  return node.kind == JsonKind::kNumber && is_integer(parser.text(node)) && parser.text(node) != "-0";
}
std::string id_text(const JsonParser& parser, const JsonNode& node) {
  std::string text(parser.text(node));
  return node.kind == JsonKind::kString ? '"' + text + '"' : text;
}

}  // namespace

std::vector<int64_t> best(std::span<const float> scores, size_t k) {
  std::vector<int64_t> all(scores.size());
  std::iota(all.begin(), all.end(), int64_t{0});
  const auto middle = all.begin() + static_cast<ptrdiff_t>(std::min(k, all.size()));
  std::partial_sort(all.begin(), middle, all.end(), [&](int64_t a, int64_t b) {
    const float x = scores[static_cast<size_t>(a)], y = scores[static_cast<size_t>(b)];
    const bool no_x = std::isnan(x), no_y = std::isnan(y);
    if (no_x || no_y || x == y) return no_x == no_y ? a < b : no_y;
    return x > y;
  });
  all.erase(middle, all.end());
  return all;
}

std::optional<RankText> RankText::read(const RankRules& rules, const WriterSchema& request, std::string body,
                                       std::string_view new_id, std::string_view now, const LoggedRules* logged) {
  RankText out;
  out.body_ = std::move(body);
  JsonParser parser, id_parser, time_parser;
  Parts parts;
  if (!out.read_members(parser, rules, new_id, now, parts)) return std::nullopt;
  std::vector<JsonMember> more{{rules.candidates, &parser, parts.candidates}};
  size_t at = 0;
  if (parts.adds_id) {
    if (id_parser.parse(bytes(out.id), at).expected) return std::nullopt;
    more.push_back({rules.id, &id_parser, 0});
  }
  if (parts.adds_time) {
    if (time_parser.parse(bytes(now), at = 0).expected) return std::nullopt;
    more.push_back({rules.time, &time_parser, 0});
  }
  out.record.data.reserve(out.body_.size() / 2);
  if (!transcode_composed(request, parser, parts.context, more, out.record)) return std::nullopt;
  if (logged && !out.dry_run) {
    BytesColumn record;
    record.data.reserve(out.body_.size());
    if (!transcode_composed(logged->schema, parser, parts.context, more, record)) return std::nullopt;
    if (!is_readable_event(logged->plan, logged->program, record.data, logged->latest_ms)) return std::nullopt;
    out.logged_bytes = record.data.size();
  }
  return out;
}

bool RankText::read_members(JsonParser& parser, const RankRules& rules, std::string_view new_id, std::string_view now,
                            Parts& parts) {
  size_t position = 0;
  if (parser.parse(bytes(body_), position).expected || JsonParser::skip_space(bytes(body_), position) < body_.size())
    return false;
  const auto& nodes = parser.nodes();
  for (uint32_t n = 0; n < nodes.size(); ++n) {
    if (nodes[n].kind == JsonKind::kObject && parser.repeated(n) != JsonParser::kNone) return false;
    if (nodes[n].kind == JsonKind::kNumber && !fits_double(parser.text(nodes[n]))) return false;
  }
  Members members;
  if (nodes[0].kind != JsonKind::kObject || !members.read(parser)) return false;
  const auto index_of = [&](const JsonNode* node) { return static_cast<uint32_t>(node - nodes.data()); };
  if (!is_flag(members.dry_run) || !is_flag(members.explain) || is_true(members.explain)) return false;
  dry_run = is_true(members.dry_run);

  const JsonNode* list = members.candidates;
  if (!list || list->kind != JsonKind::kArray || list->count == 0 || list->count > rules.max_candidates) return false;
  candidates = k = list->count;
  parts.candidates = index_of(list);
  uint32_t item = index_of(list) + 1;
  for (uint32_t c = 0; c < list->count; ++c, item = nodes[item].next) {
    if (nodes[item].kind != JsonKind::kObject) return false;
    const std::string_view text = inside(parser, nodes[item]);
    if (has_lines(text)) return false;
    Candidate one{nodes[item].start + 1, static_cast<uint32_t>(text.size()), 0};
    uint32_t key = item + 1;
    for (uint32_t m = 0; m < nodes[item].count; ++m, key = nodes[key + 1].next) {
      const std::string_view name = parser.text(nodes[key]);
      if (nodes[key].escaped || name == rules.served) return false;
      for (size_t p = 0; p < rules.places.size(); ++p)
        if (name == rules.places[p]) one.has |= uint64_t{1} << p;
    }
    of_.push_back(one);
  }
  if (members.k) {
    const std::string_view text = parser.text(*members.k);
    int64_t wanted = 0;
    if (members.k->kind != JsonKind::kNumber || !is_integer(text)) return false;
    if (std::from_chars(text.data(), text.data() + text.size(), wanted).ec != std::errc{} || wanted < 1) return false;
    if (static_cast<uint64_t>(wanted) < k) k = static_cast<size_t>(wanted);
  }

  bool has_time = false;
  if (members.context) {
    const JsonNode& object = *members.context;
    parts.context = index_of(members.context);
    if (object.kind != JsonKind::kObject) return false;
    context_ = inside(parser, object);
    if (has_lines(context_)) return false;
    uint32_t key = index_of(members.context) + 1;
    for (uint32_t m = 0; m < object.count; ++m, key = nodes[key + 1].next) {
      const std::string_view name = parser.text(nodes[key]);
      const JsonNode& value = nodes[key + 1];
      if (nodes[key].escaped || name == rules.candidates) return false;
      if (name == rules.id) {
        if (!is_id(parser, value)) return false;
        id = id_text(parser, value);
      }
      if (name == rules.time) {
        if (value.kind == JsonKind::kNull) return false;
        has_time = true;
      }
    }
  }
  if (members.request_id && (!id.empty() || !is_id(parser, *members.request_id))) return false;
  if (id.empty()) {
    id = members.request_id ? id_text(parser, *members.request_id) : std::string(new_id);
    join(context_, member(rules.id, id));
    parts.adds_id = true;
  }
  parts.adds_time = !has_time;
  if (!has_time) join(context_, member(rules.time, now));
  return true;
}

void RankText::check(const RankRules& rules, const RankOrder& order) const {
  bool good = order.scores.size() == candidates && order.predictions.size() == candidates * rules.labels.size() &&
              order.propensity.size() == order.indices.size();
  for (const int64_t i : order.indices) good = good && i >= 0 && static_cast<size_t>(i) < candidates;
  if (!good) throw std::invalid_argument("an order of other candidates, or of other labels, than the request's");
}

std::string RankText::items(const RankRules& rules, const RankOrder& order) const {
  check(rules, order);
  const size_t L = rules.labels.size();
  std::string out(1, '[');
  for (size_t place = 0; place < order.indices.size(); ++place) {
    const auto i = static_cast<size_t>(order.indices[place]);
    out.append(place ? ",{\"index\":" : "{\"index\":");
    put(out, order.indices[place]);
    out.append(",\"score\":");
    put(out, order.scores[i]);
    out.append(",\"predictions\":{");
    for (size_t l = 0; l < L; ++l) {
      if (l) out.push_back(',');
      out.append(rules.labels[l]).push_back(':');
      put(out, order.predictions[i * L + l]);
    }
    out.append("},\"propensity\":");
    put(out, order.propensity[place]);
    out.push_back('}');
  }
  return out.append("]");
}

std::string RankText::served(const RankRules& rules, const RankOrder& order, int64_t version, bool explored) const {
  check(rules, order);
  const size_t L = rules.labels.size();
  std::string out(1, '{');
  out.append(context_).append(",\"").append(rules.candidates).append("\":[");
  for (size_t place = 0; place < order.indices.size(); ++place) {
    const auto i = static_cast<size_t>(order.indices[place]);
    const Candidate& one = of_[i];
    out.append(place ? ",{" : "{").append(body_, one.start, one.size);
    for (size_t p = 0; p < rules.places.size(); ++p)
      if (!(one.has >> p & 1)) join(out, member(rules.places[p], std::to_string(place)));
    std::string served = "null";  // the schema takes no score or prediction that is not finite
    const auto predictions = order.predictions.subspan(i * L, L);
    if (std::isfinite(order.scores[i]) && std::ranges::all_of(predictions, [](float v) { return std::isfinite(v); })) {
      served = "{\"version\":";
      put(served, version);
      served.append(",\"score\":");
      put(served, order.scores[i]);
      served.append(",\"predictions\":[");
      for (size_t l = 0; l < L; ++l) {
        if (l) served.push_back(',');
        put(served, predictions[l]);
      }
      served.append("],\"propensity\":");
      put(served, order.propensity[place]);
      served.append(",\"explored\":").append(explored ? "true}" : "false}");
    }
    join(out, member(rules.served, served));
    out.push_back('}');
  }
  return out.append("]}");
}

}  // namespace freshet
