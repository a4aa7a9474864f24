#include "freshet/json_avro.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "freshet/json_parse.hpp"

namespace freshet {
namespace {

constexpr std::uint32_t kAbsent = UINT32_MAX;
constexpr std::size_t kFoundBytes = 60;

// Writes one parsed JSON value by the schema; recursion is bounded by the schema's depth.
class JsonWriter {
 public:
  JsonWriter(const WriterSchema& schema, const JsonOptions& options) : schema_(schema), options_(options) {}

  JsonParser parser;

  // Write the parsed value `json` as a record; on failure `failure` says why and `out` holds rubbish to roll back.
  bool record(std::uint32_t json, std::vector<std::uint8_t>& out) {
    out_ = &out;
    failure = {};
    found_fields_.clear();
    out.insert(out.end(), options_.prefix.begin(), options_.prefix.end());
    return value(0, json);
  }

  JsonFailure failure;

 private:
  const JsonNode& json(std::uint32_t i) const { return parser.nodes()[i]; }

  bool fail(JsonWhy why, std::uint32_t node, std::uint32_t at) {
    failure.why = why;
    failure.node = node;
    failure.path.clear();
    failure.found.clear();
    if (at != kAbsent) {
      failure.position = json(at).start;
      failure.found = excerpt(json(at));
    }
    return false;
  }

  std::string excerpt(const JsonNode& n) const {
    if (n.kind == JsonKind::kObject) return "an object";
    if (n.kind == JsonKind::kArray) return "an array";
    std::string text(parser.text(n));
    if (text.size() > kFoundBytes) {
      std::size_t cut = kFoundBytes;
      while (cut > 0 && (static_cast<std::uint8_t>(text[cut]) & 0xC0) == 0x80) --cut;
      text = text.substr(0, cut) + "...";
    }
    if (n.kind != JsonKind::kString) return text;
    std::string quoted(1, '"');
    return quoted.append(text).append(1, '"');
  }

  bool inside(const std::string& step) {
    failure.path = failure.path.empty() || failure.path[0] == '[' ? step + failure.path : std::string(step).append(".").append(failure.path);
    return false;
  }

  bool value(std::uint32_t i, std::uint32_t at) {
    const Node& node = schema_.nodes()[i];
    const JsonNode& j = json(at);
    if (node.null_branch) {
      const bool null = j.kind == JsonKind::kNull;
      write_long((node.null_branch == 1) == null ? 0 : 1, *out_);
      if (null) return true;
    }
    switch (node.op) {
      case Op::kNull:
        return j.kind == JsonKind::kNull || fail(JsonWhy::kType, i, at);
      case Op::kBool:
        if (j.kind != JsonKind::kTrue && j.kind != JsonKind::kFalse) return fail(JsonWhy::kType, i, at);
        out_->push_back(j.kind == JsonKind::kTrue);
        return true;
      case Op::kInt:
      case Op::kLong:
        return integer(i, at);
      case Op::kFloat:
      case Op::kDouble:
        return number(i, at);
      case Op::kString:
        if (j.kind != JsonKind::kString) return fail(JsonWhy::kType, i, at);
        string(j);
        return true;
      case Op::kBytes:
      case Op::kFixed:
        return bytes(i, at);
      case Op::kEnum:
        return symbol(i, at);
      case Op::kRecord:
        return object(i, at);
      case Op::kArray:
        return array(i, at);
      case Op::kMap:
        return map(i, at);
      case Op::kUnion:
        return any(i, at);
    }
    return false;
  }

  bool integer(std::uint32_t i, std::uint32_t at) {
    const auto text = parser.text(json(at));
    if (json(at).kind != JsonKind::kNumber || text.find_first_of(".eE") != text.npos) return fail(JsonWhy::kType, i, at);
    std::int64_t v = 0;
    const bool fits = std::from_chars(text.data(), text.data() + text.size(), v).ec == std::errc{};
    const bool is_int = schema_.nodes()[i].op == Op::kInt;
    if (!fits || (is_int && v != static_cast<std::int32_t>(v))) return fail(JsonWhy::kRange, i, at);
    write_long(v, *out_);
    return true;
  }

  bool number(std::uint32_t i, std::uint32_t at) {
    const auto text = parser.text(json(at));
    if (json(at).kind != JsonKind::kNumber) return fail(JsonWhy::kType, i, at);
    double v = 0;
    if (std::from_chars(text.data(), text.data() + text.size(), v).ec != std::errc{}) {
      // Out of range is too large, but for a number so near to 0 that 0 is the nearest double.
      const bool tiny = text.find("e-") != text.npos || text.find("E-") != text.npos ||
                        (text.find_first_of("eE") == text.npos && text.find("0.") <= 1);
      if (!tiny) return fail(JsonWhy::kRange, i, at);
      v = text[0] == '-' ? -0.0 : 0.0;
    }
    if (schema_.nodes()[i].op == Op::kDouble) {
      write_raw(v, *out_);
      return true;
    }
    const auto f = static_cast<float>(v);
    if (std::isinf(f)) return fail(JsonWhy::kRange, i, at);
    write_raw(f, *out_);
    return true;
  }

  std::string_view plain(const JsonNode& j) {
    if (!j.escaped) return parser.text(j);
    scratch_.clear();
    parser.unescape(j, scratch_);
    return {reinterpret_cast<const char*>(scratch_.data()), scratch_.size()};
  }

  void string(const JsonNode& j) {
    const auto text = plain(j);
    write_bytes(reinterpret_cast<const std::uint8_t*>(text.data()), text.size(), *out_);
  }

  // Bytes stand in a string as in Avro's own JSON: one character of U+0000 to U+00FF for each.
  bool bytes(std::uint32_t i, std::uint32_t at) {
    if (json(at).kind != JsonKind::kString) return fail(JsonWhy::kType, i, at);
    const auto text = plain(json(at));
    std::vector<std::uint8_t> raw;
    for (std::size_t k = 0; k < text.size(); ++k) {
      const auto c = static_cast<std::uint8_t>(text[k]);
      if (c < 0x80) {
        raw.push_back(c);
      } else if (c <= 0xC3) {
        raw.push_back(static_cast<std::uint8_t>((c << 6) | (static_cast<std::uint8_t>(text[++k]) & 0x3F)));
      } else {
        return fail(JsonWhy::kType, i, at);
      }
    }
    const Node& node = schema_.nodes()[i];
    if (node.op == Op::kBytes) {
      write_bytes(raw.data(), raw.size(), *out_);
      return true;
    }
    if (raw.size() != node.arg) return fail(JsonWhy::kSize, i, at);
    out_->insert(out_->end(), raw.begin(), raw.end());
    return true;
  }

  bool symbol(std::uint32_t i, std::uint32_t at) {
    if (json(at).kind != JsonKind::kString) return fail(JsonWhy::kType, i, at);
    const auto found = schema_.symbol(i, plain(json(at)));
    if (!found) return fail(JsonWhy::kSymbol, i, at);
    write_long(*found, *out_);
    return true;
  }

  bool array(std::uint32_t i, std::uint32_t at) {
    const JsonNode& j = json(at);
    if (j.kind != JsonKind::kArray) return fail(JsonWhy::kType, i, at);
    if (j.count) {
      write_long(j.count, *out_);
      std::uint32_t item = at + 1;
      for (std::uint32_t k = 0; k < j.count; ++k, item = json(item).next) {
        if (!value(i + 1, item)) return inside(std::string("[").append(std::to_string(k)).append("]"));
      }
    }
    out_->push_back(0);
    return true;
  }

  bool map(std::uint32_t i, std::uint32_t at) {
    const JsonNode& j = json(at);
    if (j.kind != JsonKind::kObject) return fail(JsonWhy::kType, i, at);
    if (j.count) {
      write_long(j.count, *out_);
      std::uint32_t key = at + 1;
      for (std::uint32_t k = 0; k < j.count; ++k, key = json(key + 1).next) {
        string(json(key));
        if (!value(i + 1, key + 1)) return inside(std::string(parser.text(json(key))));
      }
    }
    out_->push_back(0);
    return true;
  }

  bool object(std::uint32_t i, std::uint32_t at) {
    const JsonNode& j = json(at);
    if (j.kind != JsonKind::kObject) return fail(JsonWhy::kType, i, at);
    const auto& fields = schema_.fields(i);
    const std::size_t base = found_fields_.size();  // where this record's values are noted; nested ones come after
    found_fields_.resize(base + fields.size(), kAbsent);
    if (!match(i, at, base)) return false;
    for (std::size_t f = 0; f < fields.size(); ++f) {
      const std::uint32_t found = found_fields_[base + f];
      const Node& child = schema_.nodes()[fields[f].node];
      if (found != kAbsent) {
        if (!value(fields[f].node, found)) return inside(std::string(fields[f].name));
      } else if (fields[f].has_default) {
        out_->insert(out_->end(), fields[f].default_bytes.begin(), fields[f].default_bytes.end());
      } else if (child.null_branch) {
        write_long(child.null_branch - 1, *out_);
      } else {
        fail(JsonWhy::kMissing, fields[f].node, kAbsent);
        failure.position = j.start;
        return inside(std::string(fields[f].name));
      }
    }
    found_fields_.resize(base);
    return true;
  }

  // Note where each field of the record stands in the object. Members usually come in the schema's order.
  bool match(std::uint32_t i, std::uint32_t at, std::size_t base) {
    const auto& fields = schema_.fields(i);
    std::size_t guess = 0;
    std::uint32_t key = at + 1;
    for (std::uint32_t k = 0; k < json(at).count; ++k, key = json(key + 1).next) {
      const auto name = plain(json(key));
      if (guess >= fields.size() || fields[guess].name != name) {
        const auto it = std::find_if(fields.begin(), fields.end(), [&](const auto& f) { return f.name == name; });
        if (it == fields.end()) {
          if (options_.ignore_unknown) continue;
          const std::string unknown(name);
          fail(JsonWhy::kUnknown, i, key);
          return inside(unknown);
        }
        guess = static_cast<std::size_t>(it - fields.begin());
      }
      if (found_fields_[base + guess] != kAbsent) {
        fail(JsonWhy::kDuplicate, fields[guess].node, key);
        return inside(std::string(fields[guess].name));
      }
      found_fields_[base + guess] = key + 1;
      ++guess;
    }
    return true;
  }

  static bool may_be(const Node& node, const JsonNode& j) {
    switch (node.op) {
      case Op::kNull:
        return j.kind == JsonKind::kNull;
      case Op::kBool:
        return j.kind == JsonKind::kTrue || j.kind == JsonKind::kFalse;
      case Op::kInt:
      case Op::kLong:
      case Op::kFloat:
      case Op::kDouble:
        return j.kind == JsonKind::kNumber;
      case Op::kArray:
        return j.kind == JsonKind::kArray;
      case Op::kMap:
      case Op::kRecord:
        return j.kind == JsonKind::kObject;
      default:
        return j.kind == JsonKind::kString;
    }
  }

  // A union of several types: the first branch that takes the value. If only one may, its failure is the reason.
  bool any(std::uint32_t i, std::uint32_t at) {
    const std::uint64_t* words = schema_.program().words().data() + schema_.nodes()[i].arg;
    std::uint32_t tried = 0;
    const std::size_t size = out_->size(), noted = found_fields_.size();
    for (std::uint64_t b = 0; b < words[0]; ++b) {
      const auto child = static_cast<std::uint32_t>(words[1 + b]);
      if (!may_be(schema_.nodes()[child], json(at))) continue;
      ++tried;
      write_long(static_cast<std::int64_t>(b), *out_);
      if (value(child, at)) return true;
      out_->resize(size);
      found_fields_.resize(noted);
    }
    return tried == 1 ? false : fail(JsonWhy::kType, i, at);
  }

  const WriterSchema& schema_;
  const JsonOptions& options_;
  std::vector<std::uint8_t>* out_ = nullptr;
  std::vector<std::uint32_t> found_fields_;
  std::vector<std::uint8_t> scratch_;
};

struct Run {
  JsonWriter writer;
  Transcoded out;
  std::vector<std::span<const std::uint8_t>> texts;  // of the good ones, where they stand

  Run(const WriterSchema& schema, const JsonOptions& options) : writer(schema, options) {}

  void take(std::uint32_t json, std::size_t base) {
    if (writer.record(json, out.records.data)) {
      out.records.close();
      out.events.push_back(out.total++);
      const auto text = writer.parser.text(writer.parser.nodes()[json]);
      texts.push_back({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
      return;
    }
    out.records.rollback();
    writer.failure.index = out.total++;
    writer.failure.position -= std::min(base, writer.failure.position);
    out.bad.push_back(std::move(writer.failure));
  }

  void refuse(JsonWhy why, std::size_t position, const char* expected, std::span<const std::uint8_t> text) {
    const std::size_t cut = std::min(text.size(), position + 20);
    std::string found;
    for (std::size_t i = position; i < cut; ++i) {
      const std::uint8_t c = text[i];
      found.push_back(c >= 0x20 && c < 0x7F ? static_cast<char>(c) : '?');
    }
    out.bad.push_back({out.total++, why, 0, position, "", found.empty() ? "the end" : found, expected});
  }
};

void take_body(Run& run, std::span<const std::uint8_t> body) {
  std::size_t position = JsonParser::skip_space(body, 0);
  if (position < body.size() && body[position] == '[') {
    const JsonError error = run.writer.parser.parse(body, position);
    if (error.expected) {
      run.refuse(JsonWhy::kSyntax, error.position, error.expected, body);
      return;
    }
    const auto& nodes = run.writer.parser.nodes();
    const std::uint32_t count = nodes[0].count;
    std::uint32_t item = 1;
    for (std::uint32_t k = 0; k < count; ++k, item = nodes[item].next) run.take(item, 0);
    if (const std::size_t rest = JsonParser::skip_space(body, position); rest < body.size()) {
      run.refuse(JsonWhy::kMore, rest, "nothing after the array", body);
    }
    return;
  }
  do {
    const std::size_t start = position;
    const JsonError error = run.writer.parser.parse(body, position);
    if (!error.expected) {
      run.take(0, 0);
    } else {
      run.refuse(JsonWhy::kSyntax, error.position, error.expected, body);
      // A line a record: the next line may be whole. An event over several lines: nothing after it can be trusted.
      const auto begin = body.begin() + static_cast<std::ptrdiff_t>(start);
      const auto wrong = body.begin() + static_cast<std::ptrdiff_t>(std::min(error.position, body.size()));
      if (std::find(begin, wrong, '\n') != wrong) break;
      position = static_cast<std::size_t>(std::find(wrong, body.end(), '\n') - body.begin());
    }
    position = JsonParser::skip_space(body, position);
  } while (position < body.size());
}

}  // namespace

Transcoded transcode_each(const WriterSchema& schema, std::span<const std::uint8_t> data,
                          std::span<const std::int64_t> ends, const JsonOptions& options) {
  const BytesView events(data, ends);
  Run run(schema, options);
  for (std::size_t i = 0; i < events.size(); ++i) {
    const auto text = events[i];
    std::size_t position = 0;
    const JsonError error = run.writer.parser.parse(text, position);
    if (error.expected) {
      run.refuse(JsonWhy::kSyntax, error.position, error.expected, text);
    } else if (const std::size_t rest = JsonParser::skip_space(text, position); rest < text.size()) {
      run.refuse(JsonWhy::kMore, rest, "nothing more", text);
    } else {
      run.take(0, 0);
    }
  }
  return std::move(run.out);
}

Transcoded transcode_body(const WriterSchema& schema, std::span<const std::uint8_t> body, const JsonOptions& options) {
  Run run(schema, options);
  take_body(run, body);
  return std::move(run.out);
}

TranscodedBodies transcode_bodies(const WriterSchema& schema, std::span<const std::span<const std::uint8_t>> bodies,
                                  const JsonOptions& options, std::int64_t max_events) {
  Run run(schema, options);
  Transcoded& out = run.out;
  std::vector<std::int64_t> counts;
  for (const auto body : bodies) {
    const std::size_t before = out.records.ends.size();
    take_body(run, body);
    const auto made = static_cast<std::int64_t>(out.records.ends.size() - before);
    const bool whole = out.bad.empty() && made > 0 && made <= max_events;
    counts.push_back(whole ? made : -1);
    if (!whole) {
      out.records.ends.resize(before);
      out.records.rollback();
      run.texts.resize(before);
      out.bad.clear();
    }
  }
  return {std::move(out.records), std::move(run.texts), std::move(counts)};
}

}  // namespace freshet
