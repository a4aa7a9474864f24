#include <stdexcept>

#include "bindings.hpp"
#include "freshet/histogram.hpp"

namespace freshet {
namespace {

void aucs_of(In<std::int64_t> starts, In<double> positive, In<double> negative, Out<double> out) {
  const std::size_t cells = out.size();
  bool fits = starts.size() == cells + 1 && positive.size() == negative.size() && starts.data()[0] == 0 &&
              starts.data()[cells] == static_cast<std::int64_t>(positive.size());
  for (std::size_t c = 0; fits && c < cells; c++) fits = starts.data()[c] <= starts.data()[c + 1];
  if (!fits) throw std::invalid_argument("expected starts (C + 1) that rise from 0 to H, positive and negative (H) and out (C)");
  nb::gil_scoped_release free;
  aucs(starts.data(), cells, positive.data(), negative.data(), out.data());
}

}  // namespace

void bind_measures(nb::module_& m) {
  m.def("aucs", &aucs_of, nb::arg("starts"), nb::arg("positive"), nb::arg("negative"), nb::arg("out"),
        "Write the AUC of each of C histograms of H entries in all.");
}

}  // namespace freshet
