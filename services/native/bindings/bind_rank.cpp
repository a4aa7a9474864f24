// Rank requests as text: read, and answered.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "freshet/rank_text.hpp"

namespace freshet {
namespace {

nb::object read(const RankRules& rules, const WriterSchema& request, const nb::bytes& body, std::string_view new_id,
                std::string_view now, const WriterSchema* logged, const EventPlan* plan, const Program* program,
                int64_t latest_ms) {
  std::optional<LoggedRules> log;
  if (logged && plan && program) log.emplace(*logged, *plan, *program, latest_ms);
  auto made =
      RankText::read(rules, request, std::string(body.c_str(), body.size()), new_id, now, log ? &*log : nullptr);
  return made ? nb::cast(std::move(*made)) : nb::none();
}

// The items of the answer and, with `log`, the served event.
nb::tuple ranked(const RankText& text, const RankRules& rules, const In<int64_t>& indices, const In<float>& scores,
                 const In2<float>& predictions, const In<float>& propensity, int64_t version, bool explored, bool log) {
  const RankOrder order{view(indices), view(scores), flat(predictions), view(propensity)};
  const auto bytes = [](const std::string& s) { return nb::bytes(s.data(), s.size()); };
  nb::object served = nb::none();
  if (log) served = bytes(text.served(rules, order, version, explored));
  return nb::make_tuple(bytes(text.items(rules, order)), served);
}

}  // namespace

void bind_rank(nb::module_& m) {
  m.def("best", [](const In<float>& scores, size_t k) { return to_numpy(best(view(scores), k)); });
  nb::class_<RankRules>(m, "RankRules")
      .def("__init__", [](RankRules* self, std::string candidates, std::string id, std::string time, std::string served,
                          std::vector<std::string> places, std::vector<std::string> labels, size_t max_candidates) {
        if (places.size() > 64) throw std::invalid_argument("rank rules: expected at most 64 places");
        new (self) RankRules{std::move(candidates), std::move(id),     std::move(time), std::move(served),
                             std::move(places),     std::move(labels), max_candidates};
      });
  nb::class_<RankText>(m, "RankText", "A rank request as its client wrote it. The GIL is held: it takes microseconds.")
      .def_static("read", &read, nb::arg("rules"), nb::arg("request"), nb::arg("body"), nb::arg("new_id"),
                  nb::arg("now"), nb::arg("logged").none(), nb::arg("plan").none(), nb::arg("program").none(),
                  nb::arg("latest_ms"))
      .def(
          "record", [](RankText& text) { return to_numpy(std::move(text.record)); }, "The event as Avro; once.")
      .def_ro("id", &RankText::id)
      .def_ro("candidates", &RankText::candidates)
      .def_ro("k", &RankText::k)
      .def_ro("logged_bytes", &RankText::logged_bytes)
      .def_ro("dry_run", &RankText::dry_run)
      .def("ranked", &ranked);
}

}  // namespace freshet
