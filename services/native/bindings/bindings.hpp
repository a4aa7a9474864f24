// What the bindings share: numpy array aliases and the list of `bind_*` functions that module.cpp calls.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

namespace freshet {

namespace nb = nanobind;

// C-contiguous CPU arrays; `In` may be read-only, `Out` is written in place.
template <typename T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using In2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void bind_build(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_store(nb::module_& m);
void bind_steps(nb::module_& m);
void bind_runs(nb::module_& m);
void bind_redis(nb::module_& m);
void bind_join(nb::module_& m);
void bind_model(nb::module_& m);
void bind_gate(nb::module_& m);
void bind_loop(nb::module_& m);
void bind_gather(nb::module_& m);
void bind_avro(nb::module_& m);
void bind_blocks(nb::module_& m);
void bind_features(nb::module_& m);
void bind_requests(nb::module_& m);
void bind_intake(nb::module_& m);
void bind_measures(nb::module_& m);
void bind_rank(nb::module_& m);
void bind_codec(nb::module_& m);

}  // namespace freshet
