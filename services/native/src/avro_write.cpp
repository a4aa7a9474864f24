#include "freshet/avro_write.hpp"

#include <stdexcept>

namespace freshet {

WriterSchema::WriterSchema(Program program, std::span<const int64_t> decimals)
    : program_(std::move(program)), fields_(program_.nodes().size()) {
  const auto& words = program_.words();
  const auto demand = [](bool ok) {
    if (!ok) throw std::invalid_argument("writer schema: a record or enum is not described by its words");
  };
  for (uint32_t i = 0; i < nodes().size(); ++i) {
    const Node& node = nodes()[i];
    if (node.op == Op::kEnum) {
      demand(node.arg < words.size() && words.size() - node.arg >= 2);
      const uint64_t n = words[node.arg], first = words[node.arg + 1];
      demand(n <= program_.texts() && first <= program_.texts() - n);
    }
    if (node.op != Op::kRecord) continue;
    demand(node.arg < words.size() && words[node.arg] <= (words.size() - node.arg - 1) / 3);
    uint32_t child = i + 1;
    for (uint64_t k = 0; k < words[node.arg]; ++k) {
      const uint64_t* w = &words[node.arg + 1 + 3 * k];
      demand(child < node.end && w[0] == child && w[1] < program_.texts() && w[2] <= program_.texts());
      fields_[i].push_back(
          {child, program_.text(w[1]), w[2] != 0, w[2] ? program_.text(w[2] - 1) : std::string_view{}});
      child = nodes()[child].end;
    }
    demand(child == node.end);
  }
  for (size_t i = 0; i + 2 < decimals.size(); i += 3) {
    demand(decimals[i] >= 0 && decimals[i] < static_cast<int64_t>(nodes().size()) && decimals[i + 2] >= 0);
    decimals_[static_cast<uint32_t>(decimals[i])] = {decimals[i + 1], decimals[i + 2]};
  }
}

std::optional<uint32_t> WriterSchema::symbol(uint32_t node, std::string_view text) const {
  const uint64_t first = program_.words()[nodes()[node].arg + 1];
  for (uint32_t k = 0; k < symbols(node); ++k) {
    if (program_.text(first + k) == text) return k;
  }
  return std::nullopt;
}

}  // namespace freshet
