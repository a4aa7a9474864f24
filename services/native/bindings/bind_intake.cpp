// From bodies of requests to records of the log.
#include <nanobind/stl/string_view.h>

#include <stdexcept>

#include "arrays.hpp"
#include "freshet/event_intake.hpp"

namespace freshet {
namespace {

using Text = std::span<const uint8_t>;

// The bodies' bytes; valid as long as the list holds them.
std::vector<Text> texts(const nb::list& bodies) {
  std::vector<Text> out;
  for (const nb::handle body : bodies) {
    const auto bytes = nb::cast<nb::bytes>(body);
    out.push_back({static_cast<const uint8_t*>(bytes.data()), bytes.size()});
  }
  return out;
}

IntakeRules rules(const EventPlan& plan, const Program& program, int32_t partitions, int64_t latest_ms,
                  int64_t max_events) {
  if (partitions < 1) throw std::invalid_argument("a topic has at least one partition");
  plan.check(program);
  return {plan, program, partitions, latest_ms, max_events};
}

nb::tuple taken(Intake&& made) {
  return nb::make_tuple(to_numpy(std::move(made.counts)), to_numpy(std::move(made.partitions)),
                        to_numpy(std::move(made.positions)), to_numpy(std::move(made.starts)),
                        to_numpy(std::move(made.records)), to_numpy(std::move(made.keys)));
}

nb::tuple json(const EventPlan& plan, const Program& program, const WriterSchema& schema, const nb::list& bodies,
               bool ignore_unknown, const nb::bytes& prefix, bool keep_text, int32_t partitions, int64_t latest_ms,
               int64_t max_events) {
  const auto held = texts(bodies);
  const JsonOptions options{ignore_unknown, {static_cast<const uint8_t*>(prefix.data()), prefix.size()}};
  Intake made;
  {
    nb::gil_scoped_release release;
    made = intake_json(rules(plan, program, partitions, latest_ms, max_events), schema, held, options, keep_text);
  }
  return taken(std::move(made));
}

nb::tuple avro(const EventPlan& plan, const Program& program, uint32_t schema_id, const nb::list& bodies, bool lengths,
               int32_t partitions, int64_t latest_ms, int64_t max_events) {
  const auto held = texts(bodies);
  Intake made;
  {
    nb::gil_scoped_release release;
    made = intake_avro(rules(plan, program, partitions, latest_ms, max_events), schema_id, held, lengths);
  }
  return taken(std::move(made));
}

nb::list acks(std::string_view topic, const In<int64_t>& counts, const In<int32_t>& partitions,
              const In<int64_t>& positions, const In<int64_t>& firsts) {
  BytesColumn made;
  {
    nb::gil_scoped_release release;
    made = write_acks(topic, view(counts), view(partitions), view(positions), view(firsts));
  }
  nb::list out;
  size_t start = 0;
  for (const int64_t end : made.ends) {
    out.append(nb::bytes(made.data.data() + start, static_cast<size_t>(end) - start));
    start = static_cast<size_t>(end);
  }
  return out;
}

}  // namespace

void bind_intake(nb::module_& m) {
  m.def("intake_json", &json);
  m.def("intake_avro", &avro);
  m.def("write_acks", &acks);
}

}  // namespace freshet
