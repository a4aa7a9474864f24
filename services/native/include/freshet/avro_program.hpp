// A decoding program: the tree of a writer's Avro schema, in preorder, with an action for each value.
// Where a reader's schema differs, nodes convert the value, refuse it, or stand for the default of a field that is not
// written.
//
// Compiled by Python (freshet.features.program) from a schema and a list of wanted paths, checked here once, then run
// over any number of records by the walker (avro_walk.hpp). A program is immutable and may be shared by threads.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace freshet {

enum class Op : uint8_t {
  kNull,
  kBool,
  kInt,
  kLong,
  kFloat,
  kDouble,
  kBytes,
  kString,
  kFixed,
  kEnum,
  kRecord,
  kArray,
  kMap,
  kUnion,
  kRecursion,  // the record around this node whose node is `arg`; nothing inside is handed over
  kDefault,    // nothing is written: the bytes of string `arg` are read by the one child
  kConvert,    // a leaf of another type in the reader's schema: its words name the Conversion
  kRefuse,     // a value that the reader's schema cannot take
};
inline constexpr int64_t kOps = 18;

// How a kConvert node converts its value. At the node's arg, words: the conversion, then as listed.
enum class Conversion : uint64_t {
  kFloatOfInt,   // is_int. An int or long as float
  kDoubleOfInt,  // is_int. An int or long as double
  kScaledInt,    // is_int, factor, divisor. A time in another unit: value * factor / divisor, rounded down
  kDecimal,      // size, scale, exact. A big-endian number / 10^scale. size: of a fixed, + 1; 0: bytes. exact: a number
                 // without fraction that has no 64 bits is refused, as it is an id
  kUuid,         // A fixed of 16 bytes as the 36 characters of a UUID
  kSymbols,      // n, then n flags. An enum; symbols whose flag is 1 are refused
};

// A node of the schema's tree. Its children are the nodes up to `end`, each followed by its own subtree.
struct Node {
  Op op;
  uint8_t null_branch;  // 0: not nullable; 1: union of (null, this); 2: union of (this, null)
  bool explode;         // the array whose elements are impressions, or a union that holds it
  bool wanted;          // a sink lies in the subtree, or a value that is checked or refused: no block is skipped
  uint32_t end;         // one past the subtree
  uint32_t sink_begin;
  uint32_t sink_end;
  uint32_t arg;  // fixed: size; enum: symbols; array: least bytes of an item; map, union, convert: where its words
                 // start; recursion: a node; default: a string
};

// The action for a value; the handler defines the fields (feature_decode, feature_events).
struct Sink {
  uint32_t kind;
  uint32_t slot;
  uint64_t salt;
  uint32_t words_begin;  // in words(): an enum's keys, a bucket's edges, ...
  uint32_t words_size;
};

class Program {
 public:
  static constexpr size_t kNodeFields = 7;
  static constexpr size_t kSinkFields = 5;
  // Two schemas' 32 levels of types, unions between them: of what is written, and of a default or of records inside
  // themselves that are written out once more.
  static constexpr size_t kMaxDepth = 160;

  // Args:
  //   nodes: (n * 7) op, null_branch, flags (1: explode, 2: wanted), end, sink_begin, sink_end, arg.
  //   sinks: (m * 5) kind, slot, salt, words_begin, words_size.
  //   words: numbers that nodes and sinks refer to. At a union's arg: how many branches, then the node of each. At a
  //          map's arg: how many keys are looked up, then for each its node and its string.
  //   text, text_ends: the strings, a bytes column.
  // Throws std::invalid_argument if anything points outside.
  Program(std::span<const int64_t> nodes, std::span<const uint64_t> sinks, std::span<const uint64_t> words,
          std::span<const uint8_t> text, std::span<const int64_t> text_ends);

  const std::vector<Node>& nodes() const { return nodes_; }
  const std::vector<Sink>& sinks() const { return sinks_; }
  const std::vector<uint64_t>& words() const { return words_; }
  std::string_view text(size_t i) const;
  size_t texts() const { return text_ends_.size(); }

 private:
  void check(uint32_t i, uint32_t limit, size_t depth);
  void check_conversion(const Node& node) const;

  std::vector<Node> nodes_;
  std::vector<Sink> sinks_;
  std::vector<uint64_t> words_;
  std::vector<uint8_t> text_;
  std::vector<int64_t> text_ends_;
};

// Why a record could not be read. The numbers are those of freshet.features.failures.
enum class Why : uint8_t {
  kNone,
  kTruncated,    // the record ends inside a value
  kVarint,       // more than 10 bytes, or more than 64 bits
  kIntRange,     // an int beyond 32 bits
  kBool,         // neither 0 nor 1
  kLength,       // a negative length
  kUnion,        // no such branch
  kEnum,         // no such symbol
  kBlock,        // a block whose count or size cannot be
  kTrailing,     // bytes after the record's last field
  kUtf8,         // a string that is not UTF-8
  kMissingKey,   // a part of the key is null
  kMissingTime,  // the time is null
  kTime,         // a time that cannot be read, or out of range
  kMissingId,    // the event's id is null
  kFrame,        // no Confluent frame: too short, or another magic byte
  kUnresolved,   // a value that the reader's schema cannot take
  kSymbol,       // a symbol that the reader's enum has not, nor a default
  kDepth,        // records inside themselves more than kMaxRecursion deep, or values more than kMaxNested
  kDecimal,      // a decimal of too many digits
  kTimeRange,    // a time that has no 64 bits in the reader's unit
  kElements,     // an exploded array of more than kMaxElements elements
};

struct Failure {
  Why why = Why::kNone;
  uint32_t node = 0;   // where in the program
  int64_t offset = 0;  // bytes from the start of the record
};

}  // namespace freshet
