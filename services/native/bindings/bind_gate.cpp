#include "bindings.hpp"
#include "freshet/gate.hpp"

namespace freshet {

void bind_gate(nb::module_& m) {
  nb::class_<Gate>(m, "Gate", "A barrier whose last arriver goes on alone until it opens it for the others.")
      .def(
          "__init__",
          [](Gate* self, uint32_t parties) {
            if (parties == 0) throw nb::value_error("a gate needs at least one party");
            new (self) Gate(parties);
          },
          nb::arg("parties"))
      .def(
          "arrive", [](Gate& self) { return static_cast<int>(self.arrive()); },
          nb::call_guard<nb::gil_scoped_release>(),
          "1: the last one, who must call open() or abort(); 0: it was opened; -1: it is broken.")
      .def("open", &Gate::open, "Let the others pass.")
      .def("abort", &Gate::abort, "Tell who waits, and who arrives later, that somebody has failed.");
}

}  // namespace freshet
