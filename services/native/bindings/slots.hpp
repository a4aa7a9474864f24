// Slots of a row as Python gives them.
#pragma once

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "freshet/optim.hpp"

namespace freshet {

using SlotTuple = std::tuple<uint32_t, uint32_t, float, std::string, std::map<std::string, double>>;

inline std::vector<SlotSpec> slots_of(const std::vector<SlotTuple>& given) {
  std::vector<SlotSpec> slots;
  for (const auto& [start, width, init, rule, parameters] : given)
    slots.push_back({start, width, init, rule, parameters});
  return slots;
}

}  // namespace freshet
