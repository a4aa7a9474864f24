#include "bindings.hpp"
#include "freshet/build.hpp"

namespace freshet {

void bind_build(nb::module_& m) {
  m.def("instruction_set", &instruction_set,
        "The instruction set that the hot loops run on, chosen at load: x86-64-v4, v3 or plain.");
}

}  // namespace freshet
