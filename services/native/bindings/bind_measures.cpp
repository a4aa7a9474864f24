#include <nanobind/stl/pair.h>

#include <stdexcept>

#include "arrays.hpp"
#include "freshet/grouping.hpp"
#include "freshet/histogram.hpp"

namespace freshet {
namespace {

void aucs_of(In<int64_t> starts, In<double> positive, In<double> negative, Out<double> out) {
  const size_t cells = out.size();
  bool fits = starts.size() == cells + 1 && positive.size() == negative.size() && starts.data()[0] == 0 &&
              starts.data()[cells] == static_cast<int64_t>(positive.size());
  for (size_t c = 0; fits && c < cells; c++) fits = starts.data()[c] <= starts.data()[c + 1];
  if (!fits)
    throw std::invalid_argument("expected starts (C + 1) that rise from 0 to H, positive and negative (H) and out (C)");
  nb::gil_scoped_release free;
  aucs(starts.data(), cells, positive.data(), negative.data(), out.data());
}

nb::tuple group(In<int64_t> windows, In<uint8_t> labels, uint64_t label_count, nb::list segments, In2<double> sums,
                In<int64_t> bins, In2<double> counts, uint32_t coarse_bits) {
  MeasuredSamples from;
  from.size = windows.size();
  from.windows = windows.data();
  from.labels = labels.data();
  from.label_count = label_count;
  from.sums = sums.data();
  from.width = sums.shape(0);
  from.bins = bins.data();
  from.counts = counts.data();
  bool fits = labels.size() == from.size && sums.shape(1) == from.size && bins.size() == from.size &&
              counts.shape(0) == 2 && counts.shape(1) == from.size && label_count > 0 && coarse_bits < 16;
  for (nb::handle segment : segments) {
    const auto [keys, values] = nb::cast<std::pair<In<uint64_t>, In<uint64_t>>>(segment);
    fits = fits && keys.size() == from.size && values.size() > 0;
    from.segments.push_back({keys.data(), values.data(), values.size()});
  }
  if (!fits)
    throw std::invalid_argument(
        "expected N windows, labels, keys of each segment and bins, sums (S, N) and counts (2, N)");
  GroupedSamples made;
  {
    nb::gil_scoped_release free;
    made = group_samples(from, coarse_bits);
  }
  return nb::make_tuple(to_numpy(std::move(made.windows)), to_numpy(std::move(made.codes)),
                        to_matrix(std::move(made.sums), from.width), to_numpy(std::move(made.cell)),
                        to_numpy(std::move(made.bin)), to_matrix(std::move(made.counts), 2));
}

}  // namespace

void bind_measures(nb::module_& m) {
  m.def("group_samples", &group, nb::arg("windows"), nb::arg("labels"), nb::arg("label_count"), nb::arg("segments"),
        nb::arg("sums"), nb::arg("bins"), nb::arg("counts"), nb::arg("coarse_bits"),
        "Windows, codes and sums of cells; cell, bin and counts of entries.");
  m.def("aucs", &aucs_of, nb::arg("starts"), nb::arg("positive"), nb::arg("negative"), nb::arg("out"),
        "Write the AUC of each of C histograms of H entries in all.");
}

}  // namespace freshet
