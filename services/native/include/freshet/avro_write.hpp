// Writing Avro: the schema's tree with names and defaults, and the primitives.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "freshet/avro_program.hpp"

namespace freshet {

inline void write_long(int64_t value, std::vector<uint8_t>& out) {
  uint64_t v = (static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63);
  for (; v >= 0x80; v >>= 7) out.push_back(static_cast<uint8_t>(v | 0x80));
  out.push_back(static_cast<uint8_t>(v));
}

inline void write_bytes(const uint8_t* p, size_t n, std::vector<uint8_t>& out) {
  write_long(static_cast<int64_t>(n), out);
  out.insert(out.end(), p, p + n);
}

template <class T>
void write_raw(T value, std::vector<uint8_t>& out) {
  const auto* p = reinterpret_cast<const uint8_t*>(&value);
  out.insert(out.end(), p, p + sizeof value);
}

// A program whose nodes' args point to words that describe them: a record's [n, then child, name, default + 1 or 0 for
// each field], an enum's [n, its first symbol's string]. Names, symbols and defaults (Avro bytes) are strings of the
// program.
class WriterSchema {
 public:
  struct Field {
    uint32_t node;
    std::string_view name;
    bool has_default;
    std::string_view default_bytes;
  };

  struct Decimal {
    int64_t precision, scale;
  };

  // decimals: (k * 3) node, precision and scale of bytes and fixed that are decimals.
  // Throws std::invalid_argument if a record or enum is not described so.
  explicit WriterSchema(Program program, std::span<const int64_t> decimals = {});

  const std::vector<Node>& nodes() const { return program_.nodes(); }
  const Program& program() const { return program_; }
  // Fields of the record at this node; empty for other nodes.
  const std::vector<Field>& fields(uint32_t node) const { return fields_[node]; }
  // What a decimal's node is; null: it is none.
  const Decimal* decimal(uint32_t node) const {
    const auto found = decimals_.find(node);
    return found == decimals_.end() ? nullptr : &found->second;
  }
  uint32_t symbols(uint32_t node) const { return static_cast<uint32_t>(program_.words()[nodes()[node].arg]); }
  // Index of an enum's symbol, if it has it.
  std::optional<uint32_t> symbol(uint32_t node, std::string_view text) const;

 private:
  Program program_;
  std::vector<std::vector<Field>> fields_;
  std::unordered_map<uint32_t, Decimal> decimals_;
};

}  // namespace freshet
