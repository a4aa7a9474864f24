#include "freshet/json_avro.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "freshet/avro_convert.hpp"
#include "freshet/json_parse.hpp"

namespace freshet {
namespace {

constexpr uint32_t kAbsent = kNoNode;
constexpr size_t kFoundBytes = 60;

// Whether a JSON number is nearer to 0 than 1 is.
bool is_below_one(std::string_view number) {
  const size_t e = std::min(number.find_first_of("eE"), number.size());
  const std::string_view digits = number.substr(0, e);
  const size_t first = digits.find_first_of("123456789"), point = std::min(digits.find('.'), digits.size());
  if (first == digits.npos) return true;
  int64_t exponent = 0;
  if (e < number.size()) {
    const std::string_view power = number.substr(number[e + 1] == '+' ? e + 2 : e + 1);
    if (std::from_chars(power.data(), power.data() + power.size(), exponent).ec != std::errc{}) return power[0] == '-';
  }
  const int64_t place = static_cast<int64_t>(point) - static_cast<int64_t>(first) - (first < point);
  constexpr int64_t kFar = int64_t{1} << 40;             // more digits than any body has
  return place + std::clamp(exponent, -kFar, kFar) < 0;  // place of the first digit: 0 for units
}

// The whole number of a JSON number with a fraction or exponent, such as 5.0; only below 2^53, as JSON readers that
// convert to double cannot distinguish larger ones.
bool whole(std::string_view number, int64_t& v) {
  constexpr double kMost = 9007199254740992;
  double d = 0;
  if (std::from_chars(number.data(), number.data() + number.size(), d).ec != std::errc{}) return false;
  if (!(std::fabs(d) < kMost) || d != std::trunc(d)) return false;
  v = static_cast<int64_t>(d);
  return true;
}

// Writes one parsed JSON value by the schema; recursion is bounded by the parser's depth, and time by nodes of the
// schema × nodes of the value: a branch of a union that did not take a value is not tried again.
class JsonWriter {
 public:
  JsonWriter(const WriterSchema& schema, const JsonOptions& options, const JsonParser& parsed)
      : parser(parsed), schema_(schema), options_(options) {}

  const JsonParser& parser;

  // Write the parsed value `json` as a record; on failure `failure` has the reason, and `out` must be rolled back.
  bool record(uint32_t json, std::vector<uint8_t>& out) {
    start(out);
    return value(0, json);
  }

  // Write a record whose members are those of the object `json` (kNoNode: of none) and `more`; names are unique.
  bool composed(uint32_t json, std::span<const JsonMember> more, std::vector<uint8_t>& out) {
    start(out);
    const auto& fields = schema_.fields(0);
    found_fields_.resize(fields.size(), kAbsent);
    if (json != kNoNode && !match(0, json, 0)) return false;
    for (size_t f = 0; f < fields.size(); ++f) {
      const auto it = std::find_if(more.begin(), more.end(), [&](const auto& m) { return m.name == fields[f].name; });
      if (it == more.end()) {
        if (!field(fields[f], found_fields_[f], 0)) return false;
        continue;
      }
      if (found_fields_[f] != kAbsent) return fail(JsonWhy::kDuplicate, fields[f].node, kAbsent);
      if (it->parser == &parser) {
        if (!value(fields[f].node, it->node)) return false;
        continue;
      }
      JsonWriter apart(schema_, options_, *it->parser);
      apart.out_ = &out;
      if (!apart.value(fields[f].node, it->node)) return false;
    }
    return true;
  }

  JsonFailure failure;

 private:
  void start(std::vector<uint8_t>& out) {
    out_ = &out;
    failure = {};
    found_fields_.clear();
    if (!refused_.empty()) refused_ = {};  // clear() would zero the buckets of the largest event for each
    out.insert(out.end(), options_.prefix.begin(), options_.prefix.end());
  }

  const JsonNode& json(uint32_t i) const { return parser.nodes()[i]; }

  bool fail(JsonWhy why, uint32_t node, uint32_t at) {
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
      size_t cut = kFoundBytes;
      while (cut > 0 && (static_cast<uint8_t>(text[cut]) & 0xC0) == 0x80) --cut;
      text = text.substr(0, cut) + "...";
    }
    if (n.kind != JsonKind::kString) return text;
    std::string quoted(1, '"');
    return quoted.append(text).append(1, '"');
  }

  bool inside(const std::string& step) {
    failure.path = failure.path.empty() || failure.path[0] == '[' ? step + failure.path
                                                                  : std::string(step).append(".").append(failure.path);
    return false;
  }

  bool value(uint32_t i, uint32_t at) {
    const Node& node = schema_.nodes()[i];
    const JsonNode& j = json(at);
    if (node.null_branch) {
      const bool null = j.kind == JsonKind::kNull;
      write_long((node.null_branch == 1) == null ? 0 : 1, *out_);
      if (null) return true;
    }
    return present(node, i, at);
  }

  // A value of the node's type, null left out.
  bool present(const Node& node, uint32_t i, uint32_t at) {
    const JsonNode& j = json(at);
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
      case Op::kRecursion:  // as deep as the parser lets objects be
        return present(schema_.nodes()[node.arg], node.arg, at);
      case Op::kDefault:
      case Op::kConvert:
      case Op::kRefuse:
        break;  // of reading alone
    }
    return fail(JsonWhy::kType, i, at);
  }

  bool integer(uint32_t i, uint32_t at) {
    const auto text = parser.text(json(at));
    if (json(at).kind != JsonKind::kNumber) return fail(JsonWhy::kType, i, at);
    int64_t v = 0;
    bool fits = true;
    if (!is_fraction(text)) {
      fits = std::from_chars(text.data(), text.data() + text.size(), v).ec == std::errc{};
    } else if (!whole(text, v)) {
      return fail(JsonWhy::kType, i, at);
    }
    const bool is_int = schema_.nodes()[i].op == Op::kInt;
    if (!fits || (is_int && v != static_cast<int32_t>(v))) return fail(JsonWhy::kRange, i, at);
    write_long(v, *out_);
    return true;
  }

  bool number(uint32_t i, uint32_t at) {
    const auto text = parser.text(json(at));
    if (json(at).kind != JsonKind::kNumber) return fail(JsonWhy::kType, i, at);
    double v = 0;
    if (std::from_chars(text.data(), text.data() + text.size(), v).ec != std::errc{}) {
      if (!is_below_one(text)) return fail(JsonWhy::kRange, i, at);  // else 0 is the nearest double
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
    write_bytes(reinterpret_cast<const uint8_t*>(text.data()), text.size(), *out_);
  }

  // Bytes are a string as in Avro's own JSON: one character of U+0000 to U+00FF for each.
  // A decimal is a number; or its bytes, as those that are none.
  bool decimal(const WriterSchema::Decimal& is, uint32_t i, uint32_t at) {
    const Node& node = schema_.nodes()[i];
    std::vector<uint8_t> raw;
    const size_t size = node.op == Op::kFixed ? node.arg : 0;
    if (!decimal_bytes(parser.text(json(at)), is.scale, is.precision, size, raw)) return fail(JsonWhy::kRange, i, at);
    if (node.op == Op::kBytes) {
      write_bytes(raw.data(), raw.size(), *out_);
    } else {
      out_->insert(out_->end(), raw.begin(), raw.end());
    }
    return true;
  }

  bool bytes(uint32_t i, uint32_t at) {
    if (json(at).kind == JsonKind::kNumber) {
      if (const auto* is = schema_.decimal(i)) return decimal(*is, i, at);
    }
    if (json(at).kind != JsonKind::kString) return fail(JsonWhy::kType, i, at);
    const auto text = plain(json(at));
    std::vector<uint8_t> raw;
    for (size_t k = 0; k < text.size(); ++k) {
      const auto c = static_cast<uint8_t>(text[k]);
      if (c < 0x80) {
        raw.push_back(c);
      } else if (c <= 0xC3) {
        raw.push_back(static_cast<uint8_t>((c << 6) | (static_cast<uint8_t>(text[++k]) & 0x3F)));
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

  bool symbol(uint32_t i, uint32_t at) {
    if (json(at).kind != JsonKind::kString) return fail(JsonWhy::kType, i, at);
    const auto found = schema_.symbol(i, plain(json(at)));
    if (!found) return fail(JsonWhy::kSymbol, i, at);
    write_long(*found, *out_);
    return true;
  }

  bool array(uint32_t i, uint32_t at) {
    const JsonNode& j = json(at);
    if (j.kind != JsonKind::kArray) return fail(JsonWhy::kType, i, at);
    if (j.count) {
      write_long(j.count, *out_);
      uint32_t item = at + 1;
      for (uint32_t k = 0; k < j.count; ++k, item = json(item).next) {
        if (!value(i + 1, item)) return inside(std::string("[").append(std::to_string(k)).append("]"));
      }
    }
    out_->push_back(0);
    return true;
  }

  bool map(uint32_t i, uint32_t at) {
    const JsonNode& j = json(at);
    if (j.kind != JsonKind::kObject) return fail(JsonWhy::kType, i, at);
    if (const uint32_t again = parser.repeated(at); again != kAbsent) return twice(i, again);
    if (j.count) {
      write_long(j.count, *out_);
      uint32_t key = at + 1;
      for (uint32_t k = 0; k < j.count; ++k, key = json(key + 1).next) {
        string(json(key));
        if (!value(i + 1, key + 1)) return inside(std::string(parser.text(json(key))));
      }
    }
    out_->push_back(0);
    return true;
  }

  bool object(uint32_t i, uint32_t at) {
    const JsonNode& j = json(at);
    if (j.kind != JsonKind::kObject) return fail(JsonWhy::kType, i, at);
    const auto& fields = schema_.fields(i);
    const size_t base = found_fields_.size();  // where this record's values are noted; nested ones come after
    found_fields_.resize(base + fields.size(), kAbsent);
    if (!match(i, at, base)) return false;
    for (size_t f = 0; f < fields.size(); ++f) {
      if (!field(fields[f], found_fields_[base + f], j.start)) return false;
    }
    found_fields_.resize(base);
    return true;
  }

  // Write a record's field: the value at `found`, its default where that is kAbsent, else null.
  bool field(const WriterSchema::Field& wanted, uint32_t found, size_t record_start) {
    if (found != kAbsent) {
      if (!value(wanted.node, found)) return inside(std::string(wanted.name));
    } else if (wanted.has_default) {
      out_->insert(out_->end(), wanted.default_bytes.begin(), wanted.default_bytes.end());
    } else if (const Node& child = schema_.nodes()[wanted.node]; child.null_branch) {
      write_long(child.null_branch - 1, *out_);
    } else {
      fail(JsonWhy::kMissing, wanted.node, kAbsent);
      failure.position = record_start;
      return inside(std::string(wanted.name));
    }
    return true;
  }

  // Record the place of each field of the record in the object. Members usually come in the schema's order.
  bool match(uint32_t i, uint32_t at, size_t base) {
    const auto& fields = schema_.fields(i);
    size_t guess = 0, unknown = 0;
    uint32_t key = at + 1;
    for (uint32_t k = 0; k < json(at).count; ++k, key = json(key + 1).next) {
      const auto name = plain(json(key));
      if (guess >= fields.size() || fields[guess].name != name) {
        const auto it = std::find_if(fields.begin(), fields.end(), [&](const auto& f) { return f.name == name; });
        if (it == fields.end()) {
          if (options_.ignore_unknown) {
            if (const uint32_t again = repeated_within(key + 1); again != kAbsent) return twice(i, again);
            ++unknown;
            continue;
          }
          const std::string other(name);
          fail(JsonWhy::kUnknown, i, key);
          return inside(other);
        }
        guess = static_cast<size_t>(it - fields.begin());
      }
      if (found_fields_[base + guess] != kAbsent) {
        fail(JsonWhy::kDuplicate, fields[guess].node, key);
        return inside(std::string(fields[guess].name));
      }
      found_fields_[base + guess] = key + 1;
      ++guess;
    }
    if (unknown < 2) return true;
    const uint32_t again = parser.repeated(at);
    return again == kAbsent || twice(i, again);
  }

  // A name that one object has twice: readers differ in the value that they take.
  bool twice(uint32_t i, uint32_t key) {
    const std::string name(plain(json(key)));
    fail(JsonWhy::kDuplicate, i, key);
    return inside(name);
  }

  // As `JsonParser::repeated`, of all objects of a value that the schema does not know.
  uint32_t repeated_within(uint32_t at) {
    for (uint32_t n = at; n < json(at).next; ++n) {
      if (json(n).kind != JsonKind::kObject) continue;
      if (const uint32_t again = parser.repeated(n); again != kAbsent) return again;
    }
    return kAbsent;
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
      case Op::kRecursion:
        return j.kind == JsonKind::kObject;
      default:
        return j.kind == JsonKind::kString;
    }
  }

  static bool is_fraction(std::string_view number) { return number.find_first_of(".eE") != number.npos; }
  // Whether a union, by its words, has a branch for numbers with a fraction.
  bool takes_fractions(const uint64_t* words) const {
    return std::any_of(words + 1, words + 1 + words[0], [&](uint64_t child) {
      const Op op = schema_.nodes()[child].op;
      return op == Op::kFloat || op == Op::kDouble || schema_.decimal(static_cast<uint32_t>(child));
    });
  }

  // A union of several types: the first branch that takes the value. If only one may, its failure is the reason. A
  // number with a fraction or an exponent is a whole number only where no branch is for fractions. Within a branch of
  // another union a value may be read once for each of that union's branches, hence `refused_`. Its reasons are not
  // kept: if no branch takes the value, that is the other union's failure.
  bool any(uint32_t i, uint32_t at) {
    const uint64_t* words = schema_.program().words().data() + schema_.nodes()[i].arg;
    uint32_t tried = 0;
    const size_t size = out_->size(), noted = found_fields_.size();
    const bool fraction =
        json(at).kind == JsonKind::kNumber && is_fraction(parser.text(json(at))) && takes_fractions(words);
    for (uint64_t b = 0; b < words[0]; ++b) {
      const auto child = static_cast<uint32_t>(words[1 + b]);
      const Op op = schema_.nodes()[child].op;
      if (fraction && (op == Op::kInt || op == Op::kLong)) continue;
      const bool decimal = json(at).kind == JsonKind::kNumber && schema_.decimal(child);
      if (!decimal && !may_be(schema_.nodes()[child], json(at))) continue;
      ++tried;
      const uint64_t pair = uint64_t{child} << 32 | at;
      if (unions_ && refused_.contains(pair)) continue;
      write_long(static_cast<int64_t>(b), *out_);
      ++unions_;
      const bool taken = value(child, at);
      --unions_;
      if (taken) return true;
      if (unions_) refused_.insert(pair);
      out_->resize(size);
      found_fields_.resize(noted);
    }
    return tried == 1 ? false : fail(JsonWhy::kType, i, at);
  }

  const WriterSchema& schema_;
  const JsonOptions& options_;
  std::vector<uint8_t>* out_ = nullptr;
  std::vector<uint32_t> found_fields_;
  std::unordered_set<uint64_t> refused_;  // (branch of a union, value), of unions within unions
  uint32_t unions_ = 0;                   // around the value
  std::vector<uint8_t> scratch_;
};

using Text = std::span<const uint8_t>;

// Events of one body after the other: good ones as Avro, bad ones with the reason, each with its place in its body.
struct Run {
  JsonParser parser;
  JsonWriter writer;
  Transcoded out;

  Run(const WriterSchema& schema, const JsonOptions& options) : writer(schema, options, parser) {}

  // Take the value that was parsed last, from `begin` to `end` in its body.
  void take(size_t begin, size_t end) {
    place(begin, end);
    if (writer.record(0, out.records.data)) {
      out.records.close();
      out.events.push_back(out.total++);
      return;
    }
    out.records.rollback();
    writer.failure.index = out.total++;
    writer.failure.position -= begin;
    out.bad.push_back(std::move(writer.failure));
  }

  // Refuse the text from `begin` to `end`; `position`, at or after `begin`, is the faulty byte.
  void refuse(JsonWhy why, JsonError error, Text text, size_t begin, size_t end) {
    place(begin, end);
    const size_t cut = std::min(error.position < end ? end : text.size(), error.position + 20);
    std::string found;
    for (size_t i = error.position; i < cut; ++i) {
      const uint8_t c = text[i];
      found.push_back(c >= 0x20 && c < 0x7F ? static_cast<char>(c) : '?');
    }
    out.bad.push_back(
        {out.total++, why, 0, error.position - begin, "", found.empty() ? "the end" : found, error.expected});
  }

 private:
  void place(size_t begin, size_t end) {
    out.begins.push_back(static_cast<int64_t>(begin));
    out.ends.push_back(static_cast<int64_t>(end));
  }
};

// Reads the events of one body: values one after the other, where an array counts as its elements. Each value that
// is wrong is refused alone if its end is certain; text that cannot be split is refused as one. The media type plays no
// part.
class BodyReader {
 public:
  // Stops after `most` events and one more; if `whole`, at the first that is refused.
  BodyReader(Run& run, Text body, int64_t most, bool whole) : run_(run), body_(body), most_(most), whole_(whole) {}

  void read() {
    size_t i = JsonParser::skip_mark(body_);
    while (!done() && (i = JsonParser::skip_space(body_, i)) < body_.size()) i = value(i);
  }

 private:
  bool done() const { return run_.out.total > most_ || (whole_ && !run_.out.bad.empty()); }

  // Take or refuse the value at `i`; returns where the next one may begin.
  size_t value(size_t i) {
    if (body_[i] == '[') return array(i);
    if (body_[i] != '{') return refuse_line(i, {i, "an object, or an array of objects"});
    size_t end = i;
    JsonError error = run_.parser.parse(within(i), end);
    if (!error.expected) {
      const size_t after = skip_blanks(end);
      if (after < body_.size() && body_[after] != '\n' && body_[after] != '{' && body_[after] != '[') {
        return refuse_line(i, {after, "nothing after the event on its line"});
      }
      run_.take(i, end);
      return end;
    }
    broken_ = true;
    const Text piece = body_.first(next_object_line(i));
    error.position = std::min(error.position, piece.size());
    if (const auto cut = json_end(piece, i, false)) {
      const size_t after = skip_blanks(*cut);
      if (after == body_.size() || body_[after] == '\n' || body_[after] == '{' || body_[after] == '[') {
        error.position = std::min(error.position, *cut);
        run_.refuse(JsonWhy::kSyntax, error, piece, i, *cut);
        return *cut;
      }
    }
    return refuse_rest(i, error);
  }

  // Take or refuse each element of the array at `i`; returns the byte after it.
  size_t array(size_t i) {
    size_t comma = i;  // or the bracket before the element
    i = JsonParser::skip_space(body_, i + 1);
    if (i < body_.size() && body_[i] == ']') return i + 1;
    while (!done()) {
      if (i == body_.size() || body_[i] == ',' || body_[i] == ']') {
        run_.refuse(JsonWhy::kSyntax, {i, "an element after the bracket or comma"}, body_, comma, comma + 1);
      } else if (size_t end = i; JsonError error = run_.parser.parse(within(i), end)) {
        const auto cut = json_end(within(i), i, true);
        if (!cut) return refuse_rest(i, error);
        end = trimmed(i, *cut);
        error.position = std::min(error.position, end);
        run_.refuse(JsonWhy::kSyntax, error, body_, i, end);
        i = *cut;
      } else if (const size_t after = JsonParser::skip_space(body_, end); ends_element(after)) {
        run_.take(i, end);
        i = after;
      } else if (const auto cut = json_end(within(i), i, true)) {
        end = trimmed(i, *cut);
        run_.refuse(JsonWhy::kSyntax, {after, "a comma or ]"}, body_, i, end);
        i = *cut;
      } else {
        return refuse_rest(i, {after, "a comma or ]"});
      }
      if (i == body_.size()) return i;
      if (body_[i] == ']') return i + 1;
      comma = i;
      i = JsonParser::skip_space(body_, i + 1);
    }
    return i;
  }

  bool ends_element(size_t i) const { return i < body_.size() && (body_[i] == ',' || body_[i] == ']'); }

  size_t skip_blanks(size_t i) const {
    while (i < body_.size() && (body_[i] == ' ' || body_[i] == '\t' || body_[i] == '\r')) ++i;
    return i;
  }

  size_t end_of_line(size_t i) const {
    return static_cast<size_t>(std::find(body_.begin() + static_cast<ptrdiff_t>(i), body_.end(), '\n') - body_.begin());
  }

  // The next line after `i` that begins with a brace, or the end: where a torn line or object ends at the latest. `i`
  // rises from call to call, so that each byte of the body is passed once, however much of it is wrong.
  size_t next_object_line(size_t i) {
    if (i >= searched_from_ && i < object_line_) return object_line_;
    searched_from_ = i;
    while ((i = end_of_line(i)) < body_.size()) {
      if (++i < body_.size() && body_[i] == '{') break;
    }
    return object_line_ = i;
  }

  // The body, as far as a value at `i` may reach.
  Text within(size_t i) { return body_.first(broken_ ? next_object_line(i) : body_.size()); }

  // `end`, without the white space before it.
  size_t trimmed(size_t begin, size_t end) const {
    while (end > begin + 1 && JsonParser::is_space(body_[end - 1])) --end;
    return end;
  }

  size_t refuse_line(size_t i, JsonError error) {
    const size_t next = end_of_line(error.position);
    run_.refuse(JsonWhy::kSyntax, error, body_, i, trimmed(i, next));
    return next;
  }

  // Refuse the text as one, as it cannot be split.
  size_t refuse_rest(size_t i, JsonError error) {
    broken_ = true;
    const size_t next = next_object_line(i), end = trimmed(i, next);
    error.position = std::min(error.position, end);
    run_.refuse(JsonWhy::kSyntax, error, body_, i, end);
    return next;
  }

  Run& run_;
  const Text body_;
  const int64_t most_;
  const bool whole_;
  bool broken_ =
      false;  // an object broke off: from there on none reaches beyond the next line that begins with a brace
  size_t searched_from_ = 0, object_line_ = 0;  // the last answer of next_object_line, of these places and all between
};

}  // namespace

Transcoded transcode_each(const WriterSchema& schema, Text data, std::span<const int64_t> ends,
                          const JsonOptions& options) {
  const BytesView events(data, ends);
  Run run(schema, options);
  for (size_t i = 0; i < events.size(); ++i) {
    const auto text = events[i];
    const size_t begin = JsonParser::skip_space(text, JsonParser::skip_mark(text));
    size_t end = begin;
    const JsonError error = run.parser.parse(text, end);
    if (error) {
      run.refuse(JsonWhy::kSyntax, error, text, begin, text.size());
    } else if (const size_t rest = JsonParser::skip_space(text, end); rest < text.size()) {
      run.refuse(JsonWhy::kMore, {rest, "nothing more"}, text, begin, text.size());
    } else {
      run.take(begin, end);
    }
  }
  return std::move(run.out);
}

Transcoded transcode_body(const WriterSchema& schema, Text body, const JsonOptions& options, int64_t max_events) {
  Run run(schema, options);
  BodyReader(run, body, max_events, false).read();
  return std::move(run.out);
}

bool transcode_composed(const WriterSchema& schema, const JsonParser& parser, uint32_t object,
                        std::span<const JsonMember> more, BytesColumn& record) {
  const JsonOptions options{.ignore_unknown = true, .prefix = {}};
  if (!JsonWriter(schema, options, parser).composed(object, more, record.data)) return false;
  record.close();
  return true;
}

TranscodedBodies transcode_bodies(const WriterSchema& schema, std::span<const Text> bodies, const JsonOptions& options,
                                  int64_t max_events) {
  Run run(schema, options);
  Transcoded& out = run.out;
  TranscodedBodies made;
  for (const auto body : bodies) {
    const size_t before = out.records.ends.size();
    out.total = 0;
    out.begins.clear();
    out.ends.clear();
    BodyReader(run, body, max_events, true).read();
    const bool whole = out.bad.empty() && out.total > 0 && out.total <= max_events;
    made.counts.push_back(whole ? out.total : -1);
    if (whole) {
      for (size_t k = 0; k < out.begins.size(); ++k) {
        const auto begin = static_cast<size_t>(out.begins[k]), end = static_cast<size_t>(out.ends[k]);
        made.texts.push_back(body.subspan(begin, end - begin));
      }
    } else {
      out.records.ends.resize(before);
      out.records.rollback();
      out.bad.clear();
    }
  }
  made.records = std::move(out.records);
  return made;
}

}  // namespace freshet
