// Is this Avro of this schema, to the last byte? For events that others encoded.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "freshet/avro_program.hpp"

namespace freshet {

// (index, why) of each record that is not; framed records start with a Confluent frame. Strings must be UTF-8.
std::vector<std::pair<int64_t, Failure>> validate_avro(const Program& program, std::span<const uint8_t> data,
                                                       std::span<const int64_t> ends, bool framed);

}  // namespace freshet
