// A strict JSON parser (RFC 8259) into a flat tape of nodes: no recursion, bounded depth, valid UTF-8 only.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace freshet {

enum class JsonKind : uint8_t { kNull, kFalse, kTrue, kNumber, kString, kArray, kObject };

// A value; children follow it in order (an object's as key, value, key, value).
struct JsonNode {
  JsonKind kind;
  bool escaped;    // a string with backslashes
  uint32_t start;  // first byte of its text; a string's is without the quotes
  uint32_t size;   // of its text; an array's and an object's is from bracket to bracket
  uint32_t next;   // the node after its subtree
  uint32_t count;  // items of an array, members of an object
};

struct JsonError {
  size_t position = 0;
  const char* expected = nullptr;  // null: no error

  explicit operator bool() const { return expected != nullptr; }
};

class JsonParser {
 public:
  static constexpr size_t kMaxDepth = 64;
  static constexpr uint32_t kNone = UINT32_MAX;

  // Parse the value that starts at `position` (after white space) and set `position` to the byte after it.
  // Text of 4 GiB and more is refused. The tape is valid until the next call.
  JsonError parse(std::span<const uint8_t> text, size_t& position);

  const std::vector<JsonNode>& nodes() const { return nodes_; }
  std::string_view text(const JsonNode& node) const {
    return {reinterpret_cast<const char*>(text_.data()) + node.start, node.size};
  }
  // The first name that the object has twice, escapes resolved; kNone if each is unique.
  uint32_t repeated(uint32_t object) const;
  // Append a string's value, escapes resolved, as UTF-8.
  void unescape(const JsonNode& node, std::vector<uint8_t>& out) const;

  static bool is_space(uint8_t c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }
  static size_t skip_space(std::span<const uint8_t> text, size_t i) {
    while (i < text.size() && is_space(text[i])) ++i;
    return i;
  }
  // After a UTF-8 byte-order mark at the beginning, or 0 if there is none.
  static size_t skip_mark(std::span<const uint8_t> text) {
    return text.size() >= 3 && text[0] == 0xEF && text[1] == 0xBB && text[2] == 0xBF ? 3 : 0;
  }

 private:
  JsonError scalar(size_t& i);
  JsonError string(size_t& i);
  JsonError number(size_t& i);
  void close(uint32_t container, size_t end);

  std::span<const uint8_t> text_;
  std::vector<JsonNode> nodes_;
  std::vector<uint32_t> open_;  // arrays and objects around the current place
};

// The end of a value that is not JSON: for an element of an array the comma or bracket after it, for an object the byte
// after its brace. Nothing if brackets do not match, or if quotes do not stand where strings begin and end, since text
// and structure could then be confused. White space before the value is allowed.
std::optional<size_t> json_end(std::span<const uint8_t> text, size_t i, bool element);

}  // namespace freshet
