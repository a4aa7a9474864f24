// Columns (of csv, of parquet) to Avro records, row by row, so that they take the one way from Avro bytes to keys.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "freshet/avro_write.hpp"
#include "freshet/bytes_column.hpp"

namespace freshet {

// A column of one type. A list's has only ends: item k of row r is row starts(r) + k of the columns below it.
struct SourceColumn {
  enum class Kind : uint8_t { kInts, kDoubles, kBytes, kList };
  Kind kind;
  std::span<const int64_t> ints;    // kInts
  std::span<const double> doubles;  // kDoubles
  std::span<const uint8_t> data;    // kBytes
  std::span<const int64_t> ends;    // kBytes, kList
  std::span<const uint8_t> nulls;   // 1: null; empty: none is

  size_t size() const {
    return kind == Kind::kInts ? ints.size() : kind == Kind::kDoubles ? doubles.size() : ends.size();
  }
};

// Why a row was refused. The numbers are those of freshet.features.encoder.
enum class ColumnWhy : uint8_t { kNone, kNull, kRange, kWhole, kUtf8, kSymbol, kSize, kBool };

struct EncodedColumns {
  BytesColumn records;        // good rows
  std::vector<int64_t> rows;  // index of each
  struct Bad {
    int64_t row;
    ColumnWhy why;
    uint32_t node;
  };
  std::vector<Bad> bad;
};

inline constexpr int32_t kPassedThrough = -1;  // a record (or union) whose fields have columns
inline constexpr int32_t kNoColumn = -2;       // its default, or null, is written

// source_of: for each node of the schema, its column, or one of the two above.
// Throws std::invalid_argument if a column cannot hold what the schema needs (type, length).
EncodedColumns encode_columns(const WriterSchema& schema, std::span<const SourceColumn> columns,
                              std::span<const int32_t> source_of, size_t rows);

}  // namespace freshet
