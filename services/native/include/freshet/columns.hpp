// Columns of a file (csv, parquet) to Avro records of a schema whose leaves they are, in the order of the schema.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace freshet {

enum class ColumnType : int { integer, real, real32, truth, text };

// One leaf of the record. Values of lists stand end to end, cut by `list_ends`.
struct ColumnIn {
  ColumnType type = ColumnType::integer;
  int null_branch = -1;  // index of null in the leaf's union of two; -1: no union, and then no nulls
  bool list = false;
  const std::uint8_t* valid = nullptr;    // (n,) 0: null; nullptr: none is null
  const std::int64_t* list_ends = nullptr;  // (n,) if a list
  std::size_t values = 0;                 // how many there are: n, or the sum of the lists' lengths
  const std::int64_t* integers = nullptr;  // by type, one of these
  const double* reals = nullptr;
  const std::uint8_t* truths = nullptr;
  const std::uint8_t* text = nullptr;
  const std::int64_t* text_ends = nullptr;
  std::size_t text_bytes = 0;
};

struct EncodedColumns {
  std::vector<std::uint8_t> data;
  std::vector<std::int64_t> ends;  // (n,)
};

// Encode n records. Throws std::invalid_argument, naming the column by its index, if lengths do not agree, ends do not
// rise, or a null stands where the schema has no union.
EncodedColumns encode_columns(std::size_t n, const std::vector<ColumnIn>& columns);

}  // namespace freshet
