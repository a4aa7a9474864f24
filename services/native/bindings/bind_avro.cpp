// Ways into Avro: JSON, columns; and the check of Avro that others wrote.
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "freshet/avro_columns.hpp"
#include "freshet/avro_validate.hpp"
#include "freshet/json_avro.hpp"
#include "freshet/json_parse.hpp"

namespace freshet {
namespace {

nb::str text(const std::string& s) {
  PyObject* made = PyUnicode_DecodeUTF8(s.data(), static_cast<Py_ssize_t>(s.size()), "replace");
  if (!made) throw nb::python_error();
  return nb::steal<nb::str>(made);
}

nb::tuple transcoded(Transcoded&& made) {
  nb::list bad;
  for (const auto& b : made.bad) {
    bad.append(
        nb::make_tuple(b.index, static_cast<int>(b.why), b.node, b.position, text(b.path), text(b.found), b.expected));
  }
  return nb::make_tuple(to_numpy(std::move(made.records)), to_numpy(std::move(made.events)), bad,
                        to_numpy(std::move(made.begins)), to_numpy(std::move(made.ends)));
}

JsonOptions options(bool ignore_unknown, const nb::bytes& prefix) {
  return {ignore_unknown, {static_cast<const uint8_t*>(prefix.data()), prefix.size()}};
}

nb::tuple each(const WriterSchema& schema, const In<uint8_t>& data, const In<int64_t>& ends, bool ignore_unknown,
               const nb::bytes& prefix) {
  Transcoded made;
  const auto how = options(ignore_unknown, prefix);
  {
    nb::gil_scoped_release release;
    made = transcode_each(schema, view(data), view(ends), how);
  }
  return transcoded(std::move(made));
}

nb::tuple body(const WriterSchema& schema, const nb::bytes& data, bool ignore_unknown, const nb::bytes& prefix,
               int64_t max_events) {
  Transcoded made;
  const auto how = options(ignore_unknown, prefix);
  const std::span<const uint8_t> bytes{static_cast<const uint8_t*>(data.data()), data.size()};
  {
    nb::gil_scoped_release release;
    made = transcode_body(schema, bytes, how, max_events);
  }
  return transcoded(std::move(made));
}

// The first name that an object of a JSON text has twice; none if there is none, or the text is not JSON.
nb::object repeated_name(const nb::bytes& data) {
  const std::span<const uint8_t> bytes{static_cast<const uint8_t*>(data.data()), data.size()};
  JsonParser parser;
  size_t position = 0;
  if (parser.parse(bytes, position)) return nb::none();
  for (uint32_t n = 0; n < parser.nodes().size(); ++n) {
    if (parser.nodes()[n].kind != JsonKind::kObject) continue;
    if (const uint32_t key = parser.repeated(n); key != JsonParser::kNone) {
      return text(std::string(parser.text(parser.nodes()[key])));
    }
  }
  return nb::none();
}

// A column is (kind, values or data, ends, nulls); arrays that a kind does not need are empty.
nb::tuple columns(const WriterSchema& schema, const nb::list& sources, const In<int32_t>& source_of, size_t rows) {
  std::vector<SourceColumn> made_sources;
  for (const nb::handle source : sources) {
    const auto c = nb::cast<nb::tuple>(source);
    SourceColumn column{static_cast<SourceColumn::Kind>(nb::cast<int>(c[0])), {}, {}, {}, {}, {}};
    if (column.kind == SourceColumn::Kind::kInts) column.ints = view(nb::cast<In<int64_t>>(c[1]));
    if (column.kind == SourceColumn::Kind::kDoubles) column.doubles = view(nb::cast<In<double>>(c[1]));
    if (column.kind == SourceColumn::Kind::kBytes) column.data = view(nb::cast<In<uint8_t>>(c[1]));
    column.ends = view(nb::cast<In<int64_t>>(c[2]));
    column.nulls = view(nb::cast<In<uint8_t>>(c[3]));
    made_sources.push_back(column);
  }
  EncodedColumns made;
  {
    nb::gil_scoped_release release;
    made = encode_columns(schema, made_sources, view(source_of), rows);
  }
  std::vector<int64_t> bad;
  for (const auto& b : made.bad) bad.insert(bad.end(), {b.row, static_cast<int64_t>(b.why), b.node});
  return nb::make_tuple(to_numpy(std::move(made.records)), to_numpy(std::move(made.rows)),
                        to_matrix(std::move(bad), 3));
}

nb::object validate(const Program& program, const In<uint8_t>& data, const In<int64_t>& ends, bool framed) {
  std::vector<std::pair<int64_t, Failure>> bad;
  {
    nb::gil_scoped_release release;
    bad = validate_avro(program, view(data), view(ends), framed);
  }
  std::vector<int64_t> rows;
  for (const auto& [index, f] : bad) rows.insert(rows.end(), {index, 0, static_cast<int64_t>(f.why), f.node, f.offset});
  return to_matrix(std::move(rows), 5);
}

}  // namespace

void bind_avro(nb::module_& m) {
  nb::class_<WriterSchema>(m, "WriterSchema")
      .def("__init__", [](WriterSchema* self, const In2<int64_t>& nodes, const In<uint64_t>& words,
                          const In<uint8_t>& data, const In<int64_t>& ends, const In<int64_t>& decimals) {
        new (self) WriterSchema(Program(flat(nodes), {}, view(words), view(data), view(ends)), view(decimals));
      });
  m.def("transcode_each", &each);
  m.def("transcode_body", &body);
  m.def("repeated_name", &repeated_name);
  m.def("encode_columns", &columns);
  m.def("validate_avro", &validate);
}

}  // namespace freshet
