#include "freshet/avro_program.hpp"

#include <stdexcept>

#include "freshet/bytes_column.hpp"

namespace freshet {
namespace {

void demand(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("decoding program: ") + what);
}

}  // namespace

Program::Program(std::span<const int64_t> nodes, std::span<const uint64_t> sinks, std::span<const uint64_t> words,
                 std::span<const uint8_t> text, std::span<const int64_t> text_ends)
    : words_(words.begin(), words.end()),
      text_(text.begin(), text.end()),
      text_ends_(text_ends.begin(), text_ends.end()) {
  demand(nodes.size() % kNodeFields == 0 && !nodes.empty(), "nodes have 7 fields each");
  demand(sinks.size() % kSinkFields == 0, "sinks have 5 fields each");
  demand(words.size() < UINT32_MAX, "too many words");
  (void)BytesView(text_, text_ends_);
  for (size_t i = 0; i < sinks.size(); i += kSinkFields) {
    const auto* s = &sinks[i];
    demand(s[0] < 64 && s[1] < UINT32_MAX && s[3] <= words.size() && s[4] <= words.size() - s[3],
           "a sink is out of range");
    sinks_.push_back({static_cast<uint32_t>(s[0]), static_cast<uint32_t>(s[1]), s[2], static_cast<uint32_t>(s[3]),
                      static_cast<uint32_t>(s[4])});
  }
  const auto count = static_cast<int64_t>(nodes.size() / kNodeFields);
  const auto n_sinks = static_cast<int64_t>(sinks_.size());
  demand(count < INT32_MAX, "too many nodes");
  for (int64_t i = 0; i < count; ++i) {
    const auto* f = &nodes[static_cast<size_t>(i) * kNodeFields];
    demand(f[0] >= 0 && f[0] < kOps, "no such op");
    demand(f[1] >= 0 && f[1] <= 2, "no such null branch");
    demand(f[2] >= 0 && f[2] <= 3, "no such flags");
    demand(f[3] > i && f[3] <= count, "a subtree ends outside");
    demand(f[4] >= 0 && f[4] <= f[5] && f[5] <= n_sinks, "sinks out of range");
    demand(f[6] >= 0 && f[6] <= UINT32_MAX, "argument out of range");
    nodes_.push_back({static_cast<Op>(f[0]), static_cast<uint8_t>(f[1]), (f[2] & 1) != 0, (f[2] & 2) != 0,
                      static_cast<uint32_t>(f[3]), static_cast<uint32_t>(f[4]), static_cast<uint32_t>(f[5]),
                      static_cast<uint32_t>(f[6])});
  }
  check(0, static_cast<uint32_t>(count), 0);
  demand(nodes_[0].op == Op::kRecord && nodes_[0].end == count, "the root is one record");
  for (size_t i = nodes_.size(); i-- > 0;) {
    Node& node = nodes_[i];
    node.wanted |= node.sink_begin < node.sink_end || node.explode || node.op == Op::kRefuse;
    for (uint32_t c = static_cast<uint32_t>(i) + 1; c < node.end; c = nodes_[c].end) node.wanted |= nodes_[c].wanted;
  }
}

void Program::check(uint32_t i, uint32_t limit, size_t depth) {
  demand(depth <= kMaxDepth, "nested too deep");
  const Node& node = nodes_[i];
  demand(node.end <= limit, "a subtree is longer than its parent's");
  std::vector<uint32_t> children;
  for (uint32_t c = i + 1; c < node.end; c = nodes_[c].end) {
    children.push_back(c);
    check(c, node.end, depth + 1);
  }
  const auto listed = [&](size_t at, size_t stride, size_t first) {
    demand(at < words_.size() && words_[at] <= (words_.size() - at - 1) / stride, "words out of range");
    demand(words_[at] + first == children.size(), "not as many children as words say");
    for (size_t k = 0; k < words_[at]; ++k) {
      demand(words_[at + 1 + k * stride] == children[k + first], "a word names no child");
      if (stride == 2) demand(words_[at + 2 + k * stride] < text_ends_.size(), "no such string");
    }
  };
  switch (node.op) {
    case Op::kRecord:
      break;
    case Op::kArray:
      demand(children.size() == 1, "an array has one child");
      break;
    case Op::kMap:
      listed(node.arg, 2, 1);
      break;
    case Op::kUnion:
      listed(node.arg, 1, 0);
      break;
    case Op::kDefault:
      demand(children.size() == 1, "a default has one child");
      demand(node.arg < text_ends_.size(), "no such string");
      break;
    case Op::kRecursion:
      demand(children.empty(), "a leaf has no children");
      demand(node.arg < i && nodes_[node.arg].op == Op::kRecord && nodes_[node.arg].end > i,
             "a recursion is to a record around it");
      break;
    case Op::kConvert:
      demand(children.empty(), "a leaf has no children");
      check_conversion(node);
      break;
    default:
      demand(children.empty(), "a leaf has no children");
  }
}

void Program::check_conversion(const Node& node) const {
  demand(node.arg < words_.size(), "words out of range");
  const size_t left = words_.size() - node.arg - 1;
  const uint64_t* w = words_.data() + node.arg;
  switch (static_cast<Conversion>(w[0])) {
    case Conversion::kFloatOfInt:
    case Conversion::kDoubleOfInt:
      return demand(left >= 1, "words out of range");
    case Conversion::kScaledInt:
      return demand(left >= 3 && w[2] > 0 && w[2] <= INT64_MAX && w[3] > 0 && w[3] <= INT64_MAX,
                    "no factor or divisor");
    case Conversion::kDecimal:
      return demand(left >= 3 && w[1] <= UINT32_MAX && w[2] <= INT32_MAX, "no such decimal");
    case Conversion::kUuid:
      return;
    case Conversion::kSymbols:
      return demand(left >= 1 && w[1] <= left - 1, "words out of range");
  }
  demand(false, "no such conversion");
}

std::string_view Program::text(size_t i) const {
  const auto start = static_cast<size_t>(i ? text_ends_[i - 1] : 0);
  return {reinterpret_cast<const char*>(text_.data()) + start, static_cast<size_t>(text_ends_[i]) - start};
}

}  // namespace freshet
