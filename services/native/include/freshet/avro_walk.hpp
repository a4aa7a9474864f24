// The interpreter of decoding programs: walks one Avro record by its schema's tree and hands wanted values over.
//
// Bytes are hostile until proven otherwise: bounds are checked after every value, no arithmetic is done on a length
// before it is checked, and recursion is bounded: by kMaxRecursion and kMaxNested.
//
// A Handler has, for each value that has a sink:
//   void on_int(const Sink&, int64_t);     booleans, ints, longs
//   void on_double(const Sink&, double);        floats, doubles
//   void on_bytes(const Sink&, const uint8_t*, size_t);   strings, bytes, fixed
//   void on_enum(const Sink&, uint32_t);   index of the symbol
// and, if Handler::kExplodes, for the exploded array: void elements_begin(p), bool takes_elements(n) before a block of
// n, element_begin(p), element_end(p), elements_end(p). Nothing is called for a null.
#pragma once

#include <bit>

#include "freshet/avro_convert.hpp"
#include "freshet/avro_program.hpp"
#include "freshet/avro_utf8.hpp"

namespace freshet {

// The most items without bytes (nulls, empty records) of a record: otherwise ten bytes could announce 2^62 of them.
inline constexpr int64_t kMaxEmptyItems = 1 << 16;

// Levels of a record inside itself, as replies to replies.
inline constexpr int kMaxRecursion = 500;

// Values inside each other: records, arrays, maps, unions, levels. Each takes up to 0.5 KB of the thread's stack, 1.5
// KB under sanitizers, of at least 8 MB. A level of a recursion may have many.
inline constexpr int kMaxNested = 4'000;

template <class Handler, bool kStrict = false>
class Walker {
 public:
  // `buffer_end`: end of readable memory, at or after every record's end; lets varints be read without a check a byte.
  Walker(const Program& program, Handler& handler, const uint8_t* buffer_end)
      : nodes_(program.nodes().data()),
        sinks_(program.sinks().data()),
        program_(program),
        handler_(handler),
        buffer_end_(buffer_end) {}

  // Walk the record [begin, end). On failure `failure()` has the reason; the handler may have seen some of the values.
  bool walk(const uint8_t* begin, const uint8_t* end) {
    p_ = begin;
    end_ = end;
    empty_items_ = 0;
    depth_ = nested_ = 0;
    why_ = Why::kNone;
    node_ = 0;
    if (run(1, nodes_[0].end) && (p_ == end_ || because(Why::kTrailing))) return true;
    offset_ = p_ - begin;
    return false;
  }

  // In two parts, for who reads most fields alone: begin() a record, then walk_node() from a place in it. Returns where
  // the node ends, or null if it is bad.
  void begin(const uint8_t* end) {
    end_ = end;
    empty_items_ = 0;
    depth_ = nested_ = 0;
  }
  const uint8_t* walk_node(uint32_t node, const uint8_t* p) {
    p_ = p;
    return run(node, nodes_[node].end) ? p_ : nullptr;
  }

  Failure failure() const { return {why_, node_, offset_}; }

 private:
  bool because(Why why) {
    why_ = why;
    return false;
  }

  bool truncated() { return because(Why::kTruncated); }

  // The innermost node that failed is the one reported: node 0 is the root, which no run() reports.
  bool failed_at(uint32_t i) {
    if (node_ == 0) node_ = i;
    return false;
  }

  // Unsigned varint of at most 10 bytes and 64 bits.
  bool varint(uint64_t& out) {
    if (end_ - p_ > 0 && *p_ < 0x80) [[likely]] {
      out = *p_++;
      return true;
    }
    return buffer_end_ - p_ >= 10 ? long_varint(out, 10) : long_varint(out, static_cast<int>(end_ - p_));
  }

  bool long_varint(uint64_t& out, int available) {
    uint64_t value = 0;
    for (int i = 0; i < available; ++i) {
      const uint64_t byte = p_[i];
      value |= (byte & 0x7F) << (7 * i);
      if (byte < 0x80) {
        if (i == 9 && byte > 1) break;
        if (i >= end_ - p_) return truncated();
        p_ += i + 1;
        out = value;
        return true;
      }
    }
    return because(end_ - p_ >= 10 ? Why::kVarint : Why::kTruncated);
  }

  bool zigzag(int64_t& out) {
    uint64_t raw;
    if (!varint(raw)) return false;
    out = static_cast<int64_t>(raw >> 1) ^ -static_cast<int64_t>(raw & 1);
    return true;
  }

  bool length(int64_t& out) {
    if (!zigzag(out)) return false;
    if (out < 0) return because(Why::kLength);
    return out <= end_ - p_ || truncated();
  }

  // Run the nodes [i, stop), one after the other. After a failure the record is not read any further.
  bool run(uint32_t i, uint32_t stop) {
    if (nested_ == kMaxNested) return because(Why::kDepth);
    ++nested_;
    while (i < stop) {
      const Node& node = nodes_[i];
      if constexpr (Handler::kExplodes) {  // before the union's index, which the sample does not have
        if (node.explode) handler_.elements_begin(p_);
      }
      if (node.null_branch) {
        int64_t branch;
        if (!zigzag(branch)) return failed_at(i);
        if (branch != 0 && branch != 1) {
          because(Why::kUnion);
          return failed_at(i);
        }
        if (branch + 1 == node.null_branch) {
          i = node.end;
          continue;
        }
      }
      if (!value(node, i)) return failed_at(i);
      i = node.end;
    }
    --nested_;
    return true;
  }

  bool value(const Node& node, uint32_t i) {
    const Sink* sink = sinks_ + node.sink_begin;
    const Sink* const sinks_end = sinks_ + node.sink_end;
    switch (node.op) {
      case Op::kNull:
        return true;
      case Op::kBool: {
        if (p_ >= end_) return truncated();
        if (*p_ > 1) return because(Why::kBool);
        const int64_t v = *p_++;
        for (; sink < sinks_end; ++sink) handler_.on_int(*sink, v);
        return true;
      }
      case Op::kInt:
      case Op::kLong: {
        int64_t v;
        if (!zigzag(v)) return false;
        if (node.op == Op::kInt && v != static_cast<int32_t>(v)) return because(Why::kIntRange);
        for (; sink < sinks_end; ++sink) handler_.on_int(*sink, v);
        return true;
      }
      case Op::kFloat: {
        if (end_ - p_ < 4) return truncated();
        const float v = std::bit_cast<float>(read_u32(p_));
        p_ += 4;
        for (; sink < sinks_end; ++sink) handler_.on_double(*sink, static_cast<double>(v));
        return true;
      }
      case Op::kDouble: {
        if (end_ - p_ < 8) return truncated();
        const double v = std::bit_cast<double>(read_u64(p_));
        p_ += 8;
        for (; sink < sinks_end; ++sink) handler_.on_double(*sink, v);
        return true;
      }
      case Op::kBytes:
      case Op::kString: {
        int64_t n;
        if (!length(n)) return false;
        const auto size = static_cast<size_t>(n);
        if constexpr (kStrict) {
          if (node.op == Op::kString && utf8_prefix(p_, size) != size) return because(Why::kUtf8);
        }
        for (; sink < sinks_end; ++sink) handler_.on_bytes(*sink, p_, size);
        p_ += n;
        return true;
      }
      case Op::kFixed: {
        if (end_ - p_ < static_cast<ptrdiff_t>(node.arg)) return truncated();
        for (; sink < sinks_end; ++sink) handler_.on_bytes(*sink, p_, node.arg);
        p_ += node.arg;
        return true;
      }
      case Op::kEnum: {
        int64_t v;
        if (!zigzag(v)) return false;
        if (v < 0 || v >= static_cast<int64_t>(node.arg)) return because(Why::kEnum);
        for (; sink < sinks_end; ++sink) handler_.on_enum(*sink, static_cast<uint32_t>(v));
        return true;
      }
      case Op::kRecord:
        return run(i + 1, node.end);
      case Op::kArray:
        return array(node, i);
      case Op::kMap:
        return map(node, i);
      case Op::kUnion: {
        [[maybe_unused]] const uint8_t* const index = p_;
        int64_t branch;
        if (!zigzag(branch)) return false;
        const uint64_t* words = program_.words().data() + node.arg;
        if (branch < 0 || static_cast<uint64_t>(branch) >= words[0]) return because(Why::kUnion);
        const auto child = static_cast<uint32_t>(words[1 + branch]);
        const bool good = run(child, nodes_[child].end);
        if constexpr (Handler::kExplodes) {  // here, too, the sample has no index; its array has reported its begin
          if (node.explode) handler_.elements_begin(index);
        }
        return good;
      }
      case Op::kRecursion: {
        if (depth_ == kMaxRecursion) return because(Why::kDepth);
        ++depth_;
        const bool good = run(node.arg + 1, nodes_[node.arg].end);
        --depth_;
        return good;
      }
      case Op::kDefault:
        return written_default(node, i);
      case Op::kConvert:
        return convert(node);
      case Op::kRefuse:
        return because(Why::kUnresolved);
    }
    return false;
  }

  // The field is not written: its default, Avro bytes that the compiler made, is read in the record's stead.
  bool written_default(const Node& node, uint32_t i) {
    const uint8_t *const p = p_, *const end = end_, *const buffer_end = buffer_end_;
    const auto text = program_.text(node.arg);
    p_ = reinterpret_cast<const uint8_t*>(text.data());
    end_ = buffer_end_ = p_ + text.size();
    const bool good = run(i + 1, node.end);
    p_ = p;
    end_ = end;
    buffer_end_ = buffer_end;
    return good;
  }

  bool long_or_int(bool is_int, int64_t& v) {
    if (!zigzag(v)) return false;
    return !is_int || v == static_cast<int32_t>(v) || because(Why::kIntRange);
  }

  bool convert(const Node& node) {
    const Sink* sink = sinks_ + node.sink_begin;
    const Sink* const sinks_end = sinks_ + node.sink_end;
    const uint64_t* words = program_.words().data() + node.arg;
    int64_t v;
    switch (static_cast<Conversion>(words[0])) {
      case Conversion::kFloatOfInt:
        if (!long_or_int(words[1] != 0, v)) return false;
        for (; sink < sinks_end; ++sink) handler_.on_double(*sink, static_cast<double>(static_cast<float>(v)));
        return true;
      case Conversion::kDoubleOfInt:
        if (!long_or_int(words[1] != 0, v)) return false;
        for (; sink < sinks_end; ++sink) handler_.on_double(*sink, static_cast<double>(v));
        return true;
      case Conversion::kScaledInt:
        if (!long_or_int(words[1] != 0, v)) return false;
        if (!scaled(v, static_cast<int64_t>(words[2]), static_cast<int64_t>(words[3]))) return because(Why::kTimeRange);
        for (; sink < sinks_end; ++sink) handler_.on_int(*sink, v);
        return true;
      case Conversion::kDecimal: {
        int64_t n = static_cast<int64_t>(words[1]) - 1;
        if (n < 0) {
          if (!length(n)) return false;
        } else if (end_ - p_ < n) {
          return truncated();
        }
        const Decimal decimal(p_, static_cast<size_t>(n), static_cast<int32_t>(words[2]));
        p_ += n;
        if (!decimal.readable() || (words[3] && !decimal.has_int())) return because(Why::kDecimal);
        for (; sink < sinks_end; ++sink) {
          decimal.has_int() ? handler_.on_int(*sink, decimal.as_int()) : handler_.on_double(*sink, decimal.as_double());
        }
        return true;
      }
      case Conversion::kUuid: {
        if (end_ - p_ < 16) return truncated();
        uint8_t text[36];
        uuid_text(p_, text);
        p_ += 16;
        for (; sink < sinks_end; ++sink) handler_.on_bytes(*sink, text, sizeof text);
        return true;
      }
      case Conversion::kSymbols: {
        if (!zigzag(v)) return false;
        if (v < 0 || static_cast<uint64_t>(v) >= words[1]) return because(Why::kEnum);
        if (words[2 + v]) return because(Why::kSymbol);
        for (; sink < sinks_end; ++sink) handler_.on_enum(*sink, static_cast<uint32_t>(v));
        return true;
      }
    }
    return false;
  }

  // Start of a block of an array or map: how many items, 0 at the end. `block_end` is null if the size is not written.
  bool block(int64_t least, int64_t& count, const uint8_t*& block_end) {
    block_end = nullptr;
    if (!zigzag(count)) return false;
    if (count < 0) {
      if (count == INT64_MIN) return because(Why::kBlock);
      count = -count;
      int64_t size;
      if (!length(size)) return false;
      block_end = p_ + size;
    }
    if (least > 0) return count <= (end_ - p_) / least || because(Why::kBlock);
    if (count > kMaxEmptyItems - empty_items_) return because(Why::kBlock);
    empty_items_ += count;
    return true;
  }

  bool array(const Node& node, uint32_t i) {
    for (;;) {
      int64_t count;
      const uint8_t* block_end;
      if (!block(node.arg, count, block_end)) return false;
      if (count == 0) break;
      if (!kStrict && block_end && !node.wanted) {
        p_ = block_end;
        continue;
      }
      if constexpr (Handler::kExplodes) {
        if (node.explode && !handler_.takes_elements(count)) return because(Why::kElements);
      }
      for (; count > 0; --count) {
        if constexpr (Handler::kExplodes) {
          if (node.explode) handler_.element_begin(p_);
        }
        if (!run(i + 1, node.end)) return false;
        if constexpr (Handler::kExplodes) {
          if (node.explode) handler_.element_end(p_);
        }
      }
      if (block_end && p_ != block_end) return because(Why::kBlock);
    }
    if constexpr (Handler::kExplodes) {
      if (node.explode) handler_.elements_end(p_);
    }
    return true;
  }

  bool map(const Node& node, uint32_t i) {
    const uint64_t* words = program_.words().data() + node.arg;
    for (;;) {
      int64_t count;
      const uint8_t* block_end;
      if (!block(1, count, block_end)) return false;
      if (count == 0) return true;
      if (!kStrict && block_end && !node.wanted) {
        p_ = block_end;
        continue;
      }
      for (; count > 0; --count) {
        int64_t n;
        if (!length(n)) return false;
        const std::string_view key(reinterpret_cast<const char*>(p_), static_cast<size_t>(n));
        if constexpr (kStrict) {
          if (utf8_prefix(p_, key.size()) != key.size()) return because(Why::kUtf8);
        }
        p_ += n;
        uint32_t child = i + 1;
        for (uint64_t k = 0; k < words[0]; ++k) {
          if (program_.text(words[2 + 2 * k]) == key) child = static_cast<uint32_t>(words[1 + 2 * k]);
        }
        if (!run(child, nodes_[child].end)) return false;
      }
      if (block_end && p_ != block_end) return because(Why::kBlock);
    }
  }

  const Node* nodes_;
  const Sink* sinks_;
  const Program& program_;
  Handler& handler_;
  const uint8_t* buffer_end_;
  const uint8_t* p_ = nullptr;
  const uint8_t* end_ = nullptr;
  int64_t empty_items_ = 0;
  int depth_ = 0;   // of records inside themselves
  int nested_ = 0;  // of values in values
  int64_t offset_ = 0;
  uint32_t node_ = 0;
  Why why_ = Why::kNone;
};

}  // namespace freshet
