#include "freshet/json_parse.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "freshet/avro_utf8.hpp"

namespace freshet {
namespace {

bool is_digit(uint8_t c) { return c >= '0' && c <= '9'; }

int hex_digit(uint8_t c) {
  if (is_digit(c)) return c - '0';
  const uint8_t lower = c | 0x20;
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

// The four digits of a \u escape; -1 if they are none.
int unit_at(std::span<const uint8_t> text, size_t i) {
  if (text.size() - i < 4) return -1;
  int unit = 0;
  for (size_t k = 0; k < 4; ++k) {
    const int digit = hex_digit(text[i + k]);
    if (digit < 0) return -1;
    unit = unit * 16 + digit;
  }
  return unit;
}

void append_utf8(uint32_t c, std::vector<uint8_t>& out) {
  const auto tail = [&](int shift) { out.push_back(static_cast<uint8_t>(0x80 | ((c >> shift) & 0x3F))); };
  if (c < 0x80) {
    out.push_back(static_cast<uint8_t>(c));
  } else if (c < 0x800) {
    out.push_back(static_cast<uint8_t>(0xC0 | (c >> 6)));
    tail(0);
  } else if (c < 0x10000) {
    out.push_back(static_cast<uint8_t>(0xE0 | (c >> 12)));
    tail(6);
    tail(0);
  } else {
    out.push_back(static_cast<uint8_t>(0xF0 | (c >> 18)));
    tail(12);
    tail(6);
    tail(0);
  }
}

}  // namespace

JsonError JsonParser::parse(std::span<const uint8_t> text, size_t& i) {
  text_ = text;
  nodes_.clear();
  open_.clear();
  if (text.size() >= UINT32_MAX) return {i, "JSON of less than 4 GiB"};
  i = skip_space(text, i);
  bool want_value = true;  // else a comma or the end of the container
  for (;;) {
    if (i >= text.size()) return {i, want_value ? "a value" : "a comma or the end of the array or object"};
    const uint8_t c = text[i];
    const bool in_object = !open_.empty() && nodes_[open_.back()].kind == JsonKind::kObject;
    const char closing = in_object ? '}' : ']';
    if (!want_value) {
      if (c == ',') {
        i = skip_space(text, i + 1);
        want_value = true;
        if (in_object && (i >= text.size() || text[i] != '"')) return {i, "a name in double quotes"};
        if (!in_object && i < text.size() && text[i] == ']') return {i, "a value, as a comma came before"};
      } else if (c == static_cast<uint8_t>(closing)) {
        ++i;
        close(open_.back(), i);
        open_.pop_back();
      } else {
        return {i, in_object ? "a comma or }" : "a comma or ]"};
      }
    } else {
      if (!open_.empty() && c == static_cast<uint8_t>(closing) && nodes_[open_.back()].count == 0) {
        want_value = false;  // an empty container: closed above
        continue;
      }
      if (!open_.empty()) ++nodes_[open_.back()].count;
      if (in_object) {
        if (c != '"') return {i, "a name in double quotes, or }"};
        if (auto e = string(i); e.expected) return e;
        i = skip_space(text, i);
        if (i >= text.size() || text[i] != ':') return {i, "a colon"};
        i = skip_space(text, i + 1);
        if (i >= text.size()) return {i, "a value"};
      }
      if (text[i] == '{' || text[i] == '[') {
        if (open_.size() >= kMaxDepth) return {i, "at most 64 arrays and objects inside each other"};
        open_.push_back(static_cast<uint32_t>(nodes_.size()));
        nodes_.push_back(
            {text[i] == '{' ? JsonKind::kObject : JsonKind::kArray, false, static_cast<uint32_t>(i), 0, 0, 0});
        i = skip_space(text, i + 1);
        continue;
      }
      if (auto e = scalar(i); e.expected) return e;
      want_value = false;
    }
    if (open_.empty() && !want_value) return {};
    i = skip_space(text, i);
  }
}

void JsonParser::close(uint32_t container, size_t end) {
  JsonNode& node = nodes_[container];
  node.next = static_cast<uint32_t>(nodes_.size());
  node.size = static_cast<uint32_t>(end) - node.start;
}

JsonError JsonParser::scalar(size_t& i) {
  const auto rest = std::string_view(reinterpret_cast<const char*>(text_.data()) + i, text_.size() - i);
  const auto word = [&](std::string_view w, JsonKind kind) -> JsonError {
    if (!rest.starts_with(w)) return {i, "a value"};
    nodes_.push_back({kind, false, static_cast<uint32_t>(i), static_cast<uint32_t>(w.size()),
                      static_cast<uint32_t>(nodes_.size() + 1), 0});
    i += w.size();
    return {};
  };
  switch (text_[i]) {
    case '"':
      return string(i);
    case 'n':
      return word("null", JsonKind::kNull);
    case 't':
      return word("true", JsonKind::kTrue);
    case 'f':
      return word("false", JsonKind::kFalse);
    default:
      return number(i);
  }
}

JsonError JsonParser::string(size_t& i) {
  const size_t start = ++i;
  bool escaped = false;
  for (;;) {
    if (i >= text_.size()) return {i, "a closing double quote"};
    const uint8_t c = text_[i];
    if (c == '"') break;
    if (c < 0x20) return {i, "no control characters in a string (write \\n for a new line)"};
    if (c != '\\') {
      ++i;
      continue;
    }
    escaped = true;
    if (++i >= text_.size()) return {i, "a closing double quote"};
    if (text_[i] != 'u') {
      if (!std::memchr("\"\\/bfnrt", text_[i], 8)) return {i, "one of \" \\ / b f n r t u after a backslash"};
      ++i;
      continue;
    }
    const int unit = unit_at(text_, i + 1);
    if (unit < 0) return {i, "four hexadecimal digits after \\u"};
    i += 5;
    if (unit >= 0xD800 && unit < 0xE000) {  // half of a surrogate pair: the other half must follow
      const bool pair = unit < 0xDC00 && text_.size() - i >= 6 && text_[i] == '\\' && text_[i + 1] == 'u';
      const int low = pair ? unit_at(text_, i + 2) : -1;
      if (low < 0xDC00 || low > 0xDFFF) return {i, "a whole surrogate pair"};
      i += 6;
    }
  }
  const size_t size = i - start;
  const size_t valid = utf8_prefix(text_.data() + start, size);
  if (valid != size) return {start + valid, "UTF-8"};
  ++i;
  nodes_.push_back({JsonKind::kString, escaped, static_cast<uint32_t>(start), static_cast<uint32_t>(size),
                    static_cast<uint32_t>(nodes_.size() + 1), 0});
  return {};
}

JsonError JsonParser::number(size_t& i) {
  const size_t start = i;
  const auto at = [&](size_t k) { return k < text_.size() ? text_[k] : uint8_t{0}; };
  const auto digits = [&] {
    const size_t from = i;
    while (is_digit(at(i))) ++i;
    return i > from;
  };
  if (at(i) == '-') ++i;
  if (at(i) == '0') {
    ++i;
    if (is_digit(at(i))) return {start, "a number without leading zeros"};
  } else if (!digits()) {
    return {start, "a value"};
  }
  if (at(i) == '.') {
    ++i;
    if (!digits()) return {i, "a digit after the decimal point"};
  }
  if (at(i) == 'e' || at(i) == 'E') {
    ++i;
    if (at(i) == '+' || at(i) == '-') ++i;
    if (!digits()) return {i, "a digit in the exponent"};
  }
  nodes_.push_back({JsonKind::kNumber, false, static_cast<uint32_t>(start), static_cast<uint32_t>(i - start),
                    static_cast<uint32_t>(nodes_.size() + 1), 0});
  return {};
}

uint32_t JsonParser::repeated(uint32_t object) const {
  constexpr uint32_t kFew = 32;
  const uint32_t count = nodes_[object].count;
  if (count < 2) return kNone;
  std::string_view few[kFew];
  uint64_t seen = 0;  // a bit for the size and the end bytes of each name so far: another bit is another name
  uint32_t key = object + 1, m = 0;
  for (; m < count && count <= kFew && !nodes_[key].escaped; ++m, key = nodes_[key + 1].next) {
    const std::string_view name = few[m] = text(nodes_[key]);
    const auto ends = name.empty() ? 0u : static_cast<unsigned>(name.front() ^ (name.back() << 1));
    const uint64_t bit = uint64_t{1} << ((name.size() * 7 + ends) % 64);
    if ((seen & bit) && std::find(few, few + m, name) != few + m) return key;
    seen |= bit;
  }
  if (m == count) return kNone;
  std::vector<std::pair<std::string, uint32_t>> names;
  names.reserve(count);
  std::vector<uint8_t> name;
  key = object + 1;
  for (m = 0; m < count; ++m, key = nodes_[key + 1].next) {
    name.clear();
    unescape(nodes_[key], name);
    names.emplace_back(std::string(name.begin(), name.end()), key);
  }
  std::sort(names.begin(), names.end());
  uint32_t first = kNone;
  for (size_t n = 1; n < names.size(); ++n) {
    if (names[n].first == names[n - 1].first) first = std::min(first, names[n].second);
  }
  return first;
}

void JsonParser::unescape(const JsonNode& node, std::vector<uint8_t>& out) const {
  const uint8_t* p = text_.data() + node.start;
  const uint8_t* const end = p + node.size;
  if (!node.escaped) {
    out.insert(out.end(), p, end);
    return;
  }
  constexpr std::string_view kNames = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
  while (p < end) {
    if (*p != '\\') {
      out.push_back(*p++);
      continue;
    }
    ++p;
    if (*p != 'u') {
      out.push_back(static_cast<uint8_t>(kMeant[kNames.find(static_cast<char>(*p++))]));
      continue;
    }
    const auto unit = [&] {
      const int u = unit_at({p + 1, static_cast<size_t>(end - p - 1)}, 0);
      p += 5;
      return static_cast<uint32_t>(u);
    };
    uint32_t c = unit();
    if (c >= 0xD800 && c < 0xDC00) {
      ++p;  // the backslash of the other half, which string() has seen
      c = 0x10000 + ((c - 0xD800) << 10) + (unit() - 0xDC00);
    }
    append_utf8(c, out);
  }
}

namespace {

// Bytes of numbers, names and words outside of strings, JSON's own and others' (NaN, None, 0x1F, 1_000).
bool is_bare(uint8_t c) {
  const uint8_t lower = c | 0x20;
  return is_digit(c) || (lower >= 'a' && lower <= 'z') || c == '+' || c == '-' || c == '.' || c == '_';
}

}  // namespace

std::optional<size_t> json_end(std::span<const uint8_t> text, size_t i, bool element) {
  std::vector<uint8_t> closers;  // of the brackets that are open
  bool after_value = false;      // a value or name has just ended: a comma, colon or closing bracket is due
  bool space = false;            // white space came since
  while (i < text.size()) {
    const uint8_t c = text[i];
    const bool adjacent = after_value && !space;
    if (JsonParser::is_space(c)) {
      space = true;
      ++i;
      continue;
    }
    space = false;
    if (c == '"') {
      if (adjacent) return std::nullopt;
      for (++i; i < text.size() && text[i] != '"'; ++i) {
        if (text[i] == '\\') ++i;
      }
      if (i >= text.size()) return std::nullopt;
      ++i;
      after_value = true;
    } else if (c == '{' || c == '[') {
      if (after_value) return std::nullopt;
      closers.push_back(c == '{' ? '}' : ']');
      ++i;
    } else if (c == '}' || c == ']') {
      if (closers.empty()) return element && c == ']' ? std::optional(i) : std::nullopt;
      if (closers.back() != c) return std::nullopt;
      closers.pop_back();
      ++i;
      if (closers.empty() && !element) return i;
      after_value = true;
    } else if (c == ',' || c == ':') {
      if (closers.empty() && c == ',') return element ? std::optional(i) : std::nullopt;
      ++i;
      after_value = false;
    } else if (is_bare(c) && !adjacent) {
      while (i < text.size() && is_bare(text[i])) ++i;
      after_value = true;
    } else {
      return std::nullopt;
    }
  }
  return std::nullopt;
}

}  // namespace freshet
