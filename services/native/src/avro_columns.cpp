#include "freshet/avro_columns.hpp"

#include <cmath>
#include <stdexcept>
#include <string>

#include "freshet/avro_utf8.hpp"

namespace freshet {
namespace {

using Kind = SourceColumn::Kind;

void demand(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("columns: ") + what);
}

bool is_text(Op op) { return op == Op::kString || op == Op::kBytes || op == Op::kFixed || op == Op::kEnum; }
bool is_number(Op op) { return op >= Op::kBool && op <= Op::kDouble; }
bool fits(Op op, Kind kind) {
  return kind == Kind::kList ? op == Op::kArray : kind == Kind::kBytes ? is_text(op) : is_number(op);
}

class ColumnWriter {
 public:
  ColumnWriter(const WriterSchema& schema, std::span<const SourceColumn> columns, std::span<const int32_t> source_of)
      : schema_(schema), columns_(columns), source_of_(source_of) {
    demand(source_of.size() == schema.nodes().size(), "each node of the schema has a column or none");
  }

  // Check the subtree of a node whose columns have `rows` rows.
  void check(uint32_t i, size_t rows) const {
    const Node& node = schema_.nodes()[i];
    const int32_t source = source_of_[i];
    if (source == kNoColumn) return;
    if (source >= 0) {
      demand(static_cast<size_t>(source) < columns_.size(), "no such column");
      const SourceColumn& c = columns_[static_cast<size_t>(source)];
      demand(c.size() == rows, "columns of one level have equal lengths");
      demand(c.nulls.empty() || c.nulls.size() == rows, "a mask has the length of its column");
      if (c.kind == Kind::kBytes) (void)BytesView(c.data, c.ends);
      if (node.op == Op::kRecord) {
        demand(c.kind == Kind::kInts, "a record's own column is a mask");
        fields(i, rows);
        return;
      }
      if (node.op == Op::kUnion) {
        demand(branch(i, c.kind) != UINT32_MAX, "no branch of the union takes the column");
        return;
      }
      demand(fits(node.op, c.kind), "a column's type does not fit the schema's");
      if (node.op == Op::kArray) {
        int64_t last = 0;
        for (const auto end : c.ends) {
          demand(end >= last, "ends of a list must not fall");
          last = end;
        }
        check(i + 1, static_cast<size_t>(last));
      }
      return;
    }
    demand(node.op == Op::kRecord, "only records are passed through");
    fields(i, rows);
  }

  // Check the columns of a record's fields.
  void fields(uint32_t i, size_t rows) const {
    for (const auto& f : schema_.fields(i)) {
      demand(source_of_[f.node] != kNoColumn || f.has_default || schema_.nodes()[f.node].null_branch,
             "a field has no column, no default and is never null");
      check(f.node, rows);
    }
  }

  bool write(uint32_t i, size_t row, std::vector<uint8_t>& out) {
    const Node& node = schema_.nodes()[i];
    if (source_of_[i] < 0) {
      if (node.null_branch) write_long(2 - node.null_branch, out);
      return record(i, row, out);
    }
    const SourceColumn& c = columns_[static_cast<size_t>(source_of_[i])];
    const bool null = is_null(c, row);
    if (node.null_branch) {
      write_long((node.null_branch == 1) == null ? 0 : 1, out);
      if (null) return true;
    }
    if (node.op == Op::kUnion) {
      const uint32_t b = null ? null_branch(i) : branch(i, c.kind);
      if (b == UINT32_MAX) return refuse(ColumnWhy::kNull, i);
      write_long(b, out);
      return null || leaf(static_cast<uint32_t>(words(i)[1 + b]), c, row, out);
    }
    if (null && !(c.kind == Kind::kDoubles && !masked(c, row) && node.op >= Op::kFloat)) {
      return refuse(ColumnWhy::kNull, i);
    }
    if (node.op == Op::kRecord) return record(i, row, out);
    if (node.op != Op::kArray) return leaf(i, c, row, out);
    const int64_t first = row ? c.ends[row - 1] : 0, last = c.ends[row];
    if (last > first) write_long(last - first, out);
    for (int64_t k = first; k < last; ++k) {
      if (!write(i + 1, static_cast<size_t>(k), out)) return false;
    }
    out.push_back(0);
    return true;
  }

  ColumnWhy why = ColumnWhy::kNone;
  uint32_t at_node = 0;

 private:
  bool refuse(ColumnWhy reason, uint32_t i) {
    why = reason;
    at_node = i;
    return false;
  }

  static bool masked(const SourceColumn& c, size_t row) { return !c.nulls.empty() && c.nulls[row]; }
  // A NaN is null where nulls are allowed: readers of csv make columns with gaps of doubles.
  static bool is_null(const SourceColumn& c, size_t row) {
    return masked(c, row) || (c.kind == Kind::kDoubles && std::isnan(c.doubles[row]));
  }

  const uint64_t* words(uint32_t i) const { return schema_.program().words().data() + schema_.nodes()[i].arg; }
  uint32_t branch(uint32_t i, Kind kind) const {
    for (uint32_t b = 0; b < words(i)[0]; ++b) {
      const Op op = schema_.nodes()[words(i)[1 + b]].op;
      if (kind != Kind::kList && fits(op, kind) && !(kind == Kind::kDoubles && op < Op::kFloat)) return b;
    }
    return UINT32_MAX;
  }
  uint32_t null_branch(uint32_t i) const {
    for (uint32_t b = 0; b < words(i)[0]; ++b) {
      if (schema_.nodes()[words(i)[1 + b]].op == Op::kNull) return b;
    }
    return UINT32_MAX;
  }

  bool record(uint32_t i, size_t row, std::vector<uint8_t>& out) {
    for (const auto& f : schema_.fields(i)) {
      if (source_of_[f.node] != kNoColumn) {
        if (!write(f.node, row, out)) return false;
      } else if (f.has_default) {
        out.insert(out.end(), f.default_bytes.begin(), f.default_bytes.end());
      } else {
        write_long(schema_.nodes()[f.node].null_branch - 1, out);
      }
    }
    return true;
  }

  bool leaf(uint32_t i, const SourceColumn& c, size_t row, std::vector<uint8_t>& out) {
    if (c.kind == Kind::kBytes) {
      const auto start = static_cast<size_t>(row ? c.ends[row - 1] : 0);
      return text(i, c.data.subspan(start, static_cast<size_t>(c.ends[row]) - start), out);
    }
    const Op op = schema_.nodes()[i].op;
    if (op == Op::kFloat || op == Op::kDouble) {
      const double v = c.kind == Kind::kInts ? static_cast<double>(c.ints[row]) : c.doubles[row];
      const auto f = static_cast<float>(v);
      if (op == Op::kFloat && std::isinf(f) && !std::isinf(v)) return refuse(ColumnWhy::kRange, i);
      op == Op::kFloat ? write_raw(f, out) : write_raw(v, out);
      return true;
    }
    int64_t v;
    if (c.kind == Kind::kInts) {
      v = c.ints[row];
    } else {
      const double d = c.doubles[row];
      if (d != std::floor(d)) return refuse(ColumnWhy::kWhole, i);
      if (std::fabs(d) >= 9007199254740992.0) return refuse(ColumnWhy::kRange, i);  // 2^53: neighbours are lost
      v = static_cast<int64_t>(d);
    }
    if (op == Op::kBool) {
      if (v != 0 && v != 1) return refuse(ColumnWhy::kBool, i);
      out.push_back(static_cast<uint8_t>(v));
      return true;
    }
    if (op == Op::kInt && v != static_cast<int32_t>(v)) return refuse(ColumnWhy::kRange, i);
    write_long(v, out);
    return true;
  }

  bool text(uint32_t i, std::span<const uint8_t> value, std::vector<uint8_t>& out) {
    const Node& n = schema_.nodes()[i];
    switch (n.op) {
      case Op::kString:
        if (utf8_prefix(value.data(), value.size()) != value.size()) return refuse(ColumnWhy::kUtf8, i);
        [[fallthrough]];
      case Op::kBytes:
        write_bytes(value.data(), value.size(), out);
        return true;
      case Op::kFixed:
        if (value.size() != n.arg) return refuse(ColumnWhy::kSize, i);
        out.insert(out.end(), value.begin(), value.end());
        return true;
      default: {
        const auto found = schema_.symbol(i, {reinterpret_cast<const char*>(value.data()), value.size()});
        if (!found) return refuse(ColumnWhy::kSymbol, i);
        write_long(*found, out);
        return true;
      }
    }
  }

  const WriterSchema& schema_;
  std::span<const SourceColumn> columns_;
  std::span<const int32_t> source_of_;
};

}  // namespace

EncodedColumns encode_columns(const WriterSchema& schema, std::span<const SourceColumn> columns,
                              std::span<const int32_t> source_of, size_t rows) {
  ColumnWriter writer(schema, columns, source_of);
  writer.check(0, rows);
  EncodedColumns out;
  for (size_t row = 0; row < rows; ++row) {
    if (writer.write(0, row, out.records.data)) {
      out.records.close();
      out.rows.push_back(static_cast<int64_t>(row));
    } else {
      out.records.rollback();
      out.bad.push_back({static_cast<int64_t>(row), writer.why, writer.at_node});
    }
  }
  return out;
}

}  // namespace freshet
