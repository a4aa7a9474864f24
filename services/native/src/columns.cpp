#include "freshet/columns.hpp"

#include <bit>
#include <cstring>
#include <string>

namespace freshet {

namespace {

using Bytes = std::vector<std::uint8_t>;

[[noreturn]] void refuse(std::size_t column, const char* what) {
  throw std::invalid_argument("column " + std::to_string(column) + ": " + what);
}

void check_ends(std::size_t column, const std::int64_t* ends, std::size_t n, std::size_t total, const char* what) {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < n; i++) {
    if (ends[i] < last) refuse(column, what);
    last = ends[i];
  }
  if (static_cast<std::size_t>(last) != total) refuse(column, what);
}

void check(std::size_t index, std::size_t n, const ColumnIn& c) {
  if (c.list) {
    check_ends(index, c.list_ends, n, c.values, "list ends must rise to the number of values");
  } else if (c.values != n) {
    refuse(index, "as many values as records are needed");
  }
  if (c.type == ColumnType::text) check_ends(index, c.text_ends, c.values, c.text_bytes, "text ends must rise to the length of the data");
  if (c.null_branch < 0 && c.valid != nullptr) {
    for (std::size_t i = 0; i < n; i++)
      if (!c.valid[i]) refuse(index, "a null, where the schema has no null");
  }
}

void put_long(Bytes& out, std::int64_t value) {
  auto zigzag = (static_cast<std::uint64_t>(value) << 1) ^ static_cast<std::uint64_t>(value >> 63);
  while (zigzag >= 0x80) {
    out.push_back(static_cast<std::uint8_t>(zigzag | 0x80));
    zigzag >>= 7;
  }
  out.push_back(static_cast<std::uint8_t>(zigzag));
}

template <class T>
void put_fixed(Bytes& out, T value) {  // IEEE bits, little-endian whatever the machine is
  for (std::size_t i = 0; i < sizeof(T); i++) out.push_back(static_cast<std::uint8_t>(value >> (8 * i)));
}

void put_value(Bytes& out, const ColumnIn& c, std::size_t i) {
  switch (c.type) {
    case ColumnType::integer: put_long(out, c.integers[i]); break;
    case ColumnType::real: put_fixed(out, std::bit_cast<std::uint64_t>(c.reals[i])); break;
    case ColumnType::real32: put_fixed(out, std::bit_cast<std::uint32_t>(static_cast<float>(c.reals[i]))); break;
    case ColumnType::truth: out.push_back(c.truths[i] ? 1 : 0); break;
    case ColumnType::text: {
      const std::int64_t start = i ? c.text_ends[i - 1] : 0;
      put_long(out, c.text_ends[i] - start);
      out.insert(out.end(), c.text + start, c.text + c.text_ends[i]);
      break;
    }
  }
}

void put_leaf(Bytes& out, const ColumnIn& c, std::size_t i) {
  const bool null = c.valid != nullptr && !c.valid[i];
  if (c.null_branch >= 0) {
    put_long(out, null ? c.null_branch : 1 - c.null_branch);
    if (null) return;
  }
  if (!c.list) return put_value(out, c, i);
  const auto start = static_cast<std::size_t>(i ? c.list_ends[i - 1] : 0), stop = static_cast<std::size_t>(c.list_ends[i]);
  if (stop > start) {
    put_long(out, static_cast<std::int64_t>(stop - start));
    for (std::size_t v = start; v < stop; v++) put_value(out, c, v);
  }
  put_long(out, 0);
}

}  // namespace

EncodedColumns encode_columns(std::size_t n, const std::vector<ColumnIn>& columns) {
  for (std::size_t i = 0; i < columns.size(); i++) check(i, n, columns[i]);
  EncodedColumns out;
  out.ends.reserve(n);
  out.data.reserve(n * (4 * columns.size() + 8));
  for (std::size_t i = 0; i < n; i++) {
    for (const ColumnIn& column : columns) put_leaf(out.data, column, i);
    out.ends.push_back(static_cast<std::int64_t>(out.data.size()));
  }
  return out;
}

}  // namespace freshet
