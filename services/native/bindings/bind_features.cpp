// Hashing, partitioning, decoding programs, features and events.
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "arrays.hpp"
#include "freshet/block.hpp"
#include "freshet/feature_events.hpp"
#include "freshet/hash.hpp"
#include "freshet/murmur.hpp"

namespace freshet {
namespace {

using Words = In<uint64_t>;

nb::object keys_of(const In<uint8_t>& data, const In<int64_t>& ends, uint64_t salt) {
  auto out = HeapArray<uint64_t>::zeroed(ends.size());
  {
    nb::gil_scoped_release release;
    const BytesView column(view(data), view(ends));
    for (size_t i = 0; i < column.size(); ++i) out.data[i] = key_of_bytes(column[i].data(), column[i].size(), salt);
  }
  return to_numpy(std::move(out));
}

template <class T, uint64_t (*key)(T, uint64_t)>
nb::object keys_of_numbers(const In<T>& values, uint64_t salt) {
  auto out = HeapArray<uint64_t>::zeroed(values.size());
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < values.size(); ++i) out.data[i] = key(values.data()[i], salt);
  }
  return to_numpy(std::move(out));
}

nb::object partitions(const In<uint8_t>& data, const In<int64_t>& ends, int32_t n) {
  if (n < 1) throw std::invalid_argument("a topic has at least one partition");
  auto out = HeapArray<int32_t>::zeroed(ends.size());
  {
    nb::gil_scoped_release release;
    partition_of(view(data), view(ends), n, {out.begin(), out.size});
  }
  return to_numpy(std::move(out));
}

nb::object failures(const std::vector<std::array<int64_t, 5>>& rows) {
  std::vector<int64_t> out;
  for (const auto& row : rows) out.insert(out.end(), row.begin(), row.end());
  return to_matrix(std::move(out), 5);
}

std::array<int64_t, 5> failure_row(int64_t index, int64_t program, const Failure& f) {
  return {index, program, static_cast<int64_t>(f.why), f.node, f.offset};
}

DecodePlan make_plan(const std::vector<std::vector<int64_t>>& groups, const std::vector<uint32_t>& segments,
                     uint32_t columns, const std::vector<uint32_t>& list_max, const std::vector<uint8_t>& log1p,
                     uint32_t served, const std::vector<std::vector<uint64_t>>& times,
                     const std::vector<std::vector<uint64_t>>& crosses,
                     const std::vector<std::vector<uint64_t>>& constant_keys,
                     const std::vector<uint32_t>& constant_dense, const std::vector<float>& constant_values) {
  DecodePlan plan;
  const auto word = [](uint64_t v) {
    if (v > UINT32_MAX) throw std::invalid_argument("feature plan: an index is out of range");
    return static_cast<uint32_t>(v);
  };
  for (const auto& group : groups) {
    auto& entries = plan.groups.emplace_back();
    for (const auto e : group) entries.push_back({e < 0, word(static_cast<uint64_t>(e < 0 ? -e - 1 : e))});
  }
  plan.segments = segments;
  plan.columns = columns;
  plan.list_max = list_max;
  plan.log1p = log1p;
  plan.served = served;
  for (const auto& t : times) plan.times.push_back({word(t.at(0)), static_cast<TimePart>(t.at(1)), t.at(2)});
  for (const auto& c : crosses) {
    auto& cross = plan.crosses.emplace_back();
    cross.column = word(c.at(0));
    cross.seed = c.at(1);
    for (size_t i = 2; i < c.size(); ++i) cross.parts.push_back(word(c[i]));
  }
  for (const auto& c : constant_keys) plan.constant_keys.emplace_back(word(c.at(0)), c.at(1));
  for (size_t i = 0; i < constant_dense.size(); ++i) {
    plan.constant_dense.emplace_back(constant_dense[i], constant_values.at(i));
  }
  plan.check();
  return plan;
}

nb::tuple tuple_of(DecodedBatch made) {
  nb::list groups, list_ends, segments;
  for (auto& g : made.groups) {
    groups.append(
        nb::make_tuple(to_numpy(std::move(g.keys)), to_numpy(std::move(g.feature_starts)), nb::cast(g.lists)));
  }
  for (auto& e : made.list_ends) list_ends.append(to_numpy(std::move(e)));
  for (auto& s : made.segments) segments.append(to_numpy(std::move(s)));
  std::vector<std::array<int64_t, 5>> bad;
  for (const auto& b : made.bad) bad.push_back(failure_row(b.index, b.program, b.failure));
  return nb::make_tuple(made.size, groups, list_ends, to_numpy(std::move(made.dense)), segments,
                        to_numpy(std::move(made.served)), failures(bad));
}

nb::tuple decode(const DecodePlan& plan, const std::vector<const Program*>& programs, const In<int32_t>& which,
                 const In<uint8_t>& data, const In<int64_t>& ends, const In<int64_t>& times, bool serving) {
  DecodedBatch made;
  {
    nb::gil_scoped_release release;
    for (const auto* program : programs) plan.check(*program);
    made = decode_features(plan, programs, view(which), view(data), view(ends), view(times), serving);
  }
  return tuple_of(std::move(made));
}

// Blocks of one schema, read and decoded for training in one call: a lane takes the interpreter's lock once and not
// twice. None where anything is out of the ordinary: another schema, a damaged block, a record that cannot be decoded.
nb::object decode_usual_blocks(const DecodePlan& plan, const Program& program, uint32_t schema_id,
                               const In<uint8_t>& data, const In<int64_t>& ends) {
  BlockColumns read;
  DecodedBatch made;
  bool usual;
  {
    nb::gil_scoped_release release;
    plan.check(program);
    size_t failed = 0;
    const auto ours = [&](uint32_t id) { return id == schema_id; };
    usual = read_blocks(view(data), view(ends), read, failed).empty() &&
            std::all_of(read.schema_ids.begin(), read.schema_ids.end(), ours);
    if (usual) {
      const Program* const programs[] = {&program};
      made = decode_features(plan, programs, {}, read.payloads.data, read.payloads.ends, read.times_ms, false);
      usual = made.bad.empty();
    }
  }
  if (!usual) return nb::none();
  const nb::tuple columns = nb::make_tuple(to_numpy(std::move(read.sample_ids)), to_numpy(std::move(read.requests)),
                                           to_numpy(std::move(read.times_ms)), to_numpy(std::move(read.labels)),
                                           to_numpy(std::move(read.values)), to_numpy(std::move(read.weights)));
  return nb::make_tuple(tuple_of(std::move(made)), columns);
}

nb::object halves(const std::vector<Hash128>& hashes) {
  std::vector<uint64_t> out;
  out.reserve(2 * hashes.size());
  for (const auto& h : hashes) {
    out.push_back(h.high);
    out.push_back(h.low);
  }
  return to_matrix(std::move(out), 2);
}

nb::tuple extract(const EventPlan& plan, const Program& program, const In<uint8_t>& data, const In<int64_t>& ends,
                  bool framed) {
  ExtractedEvents made;
  {
    nb::gil_scoped_release release;
    plan.check(program);
    made = extract_events(plan, program, view(data), view(ends), framed);
  }
  std::vector<int64_t> spans;
  for (const auto& row : made.spans) spans.insert(spans.end(), row.begin(), row.end());
  nb::list columns;
  for (size_t c = 0; c < made.columns.size(); ++c) {
    auto& column = made.columns[c];
    auto values = plan.column_is_hash[c] ? to_numpy(std::move(column.hashes)) : to_numpy(std::move(column.numbers));
    columns.append(nb::make_tuple(values, to_numpy(std::move(column.null))));
  }
  std::vector<std::array<int64_t, 5>> bad;
  for (const auto& b : made.bad) bad.push_back(failure_row(b.index, 0, b.failure));
  return nb::make_tuple(to_numpy(std::move(made.events)), to_numpy(std::move(made.request_keys)),
                        to_numpy(std::move(made.event_index)), halves(made.impressions),
                        to_numpy(std::move(made.requests)), halves(made.ids), to_numpy(std::move(made.times_ms)),
                        to_matrix(std::move(spans), 6), columns, failures(bad));
}

nb::tuple splice_spans(const In<uint8_t>& data, const In2<int64_t>& spans) {
  BytesColumn made;
  {
    nb::gil_scoped_release release;
    made = splice(view(data), flat(spans));
  }
  return to_numpy(std::move(made));
}

}  // namespace

void bind_features(nb::module_& m) {
  m.def("xxh3_64", [](nb::bytes data, uint64_t seed) {
    return xxh3_64(static_cast<const uint8_t*>(data.data()), data.size(), seed);
  });
  m.def("keys_of_bytes", &keys_of);
  m.def("keys_of_ints", &keys_of_numbers<int64_t, key_of_int>);
  m.def("keys_of_doubles", &keys_of_numbers<double, key_of_double>);
  m.def("murmur2", [](nb::bytes key) { return murmur2(static_cast<const uint8_t*>(key.data()), key.size()); });
  m.def("partition_of", &partitions);

  nb::class_<Program>(m, "Program")
      .def("__init__", [](Program* self, const In2<int64_t>& nodes, const In2<uint64_t>& sinks, const Words& words,
                          const In<uint8_t>& text, const In<int64_t>& text_ends) {
        new (self) Program(flat(nodes), flat(sinks), view(words), view(text), view(text_ends));
      });
  nb::class_<DecodePlan>(m, "DecodePlan");
  m.def("feature_plan", &make_plan);
  m.def("decode_features", &decode);
  m.def("decode_usual_blocks", &decode_usual_blocks);

  nb::class_<EventPlan>(m, "EventPlan");
  m.def("event_plan",
        [](bool explode, bool has_id, bool time_in_element, bool id_in_element, const std::vector<uint8_t>& parts,
           const std::vector<uint8_t>& hashes, const std::vector<uint8_t>& in_element) {
          return EventPlan{explode, has_id, time_in_element, id_in_element, parts, hashes, in_element};
        });
  m.def("extract_events", &extract);
  m.def("splice", &splice_spans);
  m.def("parse_iso_time", [](nb::str text) -> nb::object {
    int64_t ms;
    return parse_iso_time(text.c_str(), ms) ? nb::object(nb::int_(ms)) : nb::none();
  });
}

}  // namespace freshet
