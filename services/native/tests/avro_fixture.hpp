// A schema with every kind of type, written out as a program: for tests and fuzz targets, which have no compiler.
//
// record { id: long, name: string, price: null|double, kind: enum(3), tags: [string], stats: map<long>,
//          any: long|string|null, raw: fixed(3), ok: boolean, count: int, blob: bytes,
//          items: [ { item: long, w: float } ] }
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "freshet/avro_program.hpp"
#include "freshet/avro_write.hpp"
#include "freshet/feature_decode.hpp"
#include "freshet/feature_events.hpp"

namespace freshet::fixture {

inline constexpr uint32_t kSymbols = 3;

struct Builder {
  std::vector<int64_t> nodes;
  std::vector<uint64_t> sinks, words;
  std::vector<uint8_t> text;
  std::vector<int64_t> ends;

  size_t open(Op op, int64_t arg = 0, int64_t null_branch = 0, bool explode = false) {
    const auto at = nodes.size();
    const auto next = static_cast<int64_t>(sinks.size() / Program::kSinkFields);
    nodes.insert(nodes.end(), {static_cast<int64_t>(op), null_branch, explode, 0, next, next, arg});
    return at;
  }
  void sink(uint64_t kind, uint64_t slot, uint64_t begin = 0, uint64_t size = 0) {
    sinks.insert(sinks.end(), {kind, slot, 7, begin, size});
  }
  void close(size_t at) {
    nodes[at + 3] = static_cast<int64_t>(nodes.size() / Program::kNodeFields);
    if (static_cast<size_t>(nodes[at + 3] - 1) * Program::kNodeFields == at) {
      nodes[at + 5] = static_cast<int64_t>(sinks.size() / Program::kSinkFields);  // a leaf's own sinks
    }
  }
  int64_t index(size_t at) const { return static_cast<int64_t>(at / Program::kNodeFields); }
  uint64_t string(const std::string& s) {
    text.insert(text.end(), s.begin(), s.end());
    ends.push_back(static_cast<int64_t>(text.size()));
    return ends.size() - 1;
  }
  Program build() const { return Program(nodes, sinks, words, text, ends); }
};

enum class For { kNothing, kFeatures, kEvents, kWriting };

// A leaf whose sinks are those given: {kind, slot} each.
inline size_t leaf(Builder& b, Op op, std::vector<std::pair<uint64_t, uint64_t>> sinks = {}, int64_t arg = 0,
                   int64_t null_branch = 0) {
  const auto at = b.open(op, arg, null_branch);
  for (const auto& [kind, slot] : sinks) b.sink(kind, slot, 0, op == Op::kEnum ? kSymbols : 0);
  b.close(at);
  return at;
}

inline Builder builder(For use) {
  using Sinks = std::vector<std::pair<uint64_t, uint64_t>>;
  const bool features = use == For::kFeatures, events = use == For::kEvents, writing = use == For::kWriting;
  const auto either = [&](Sinks f, Sinks e) { return features ? f : events ? e : Sinks{}; };
  Builder b;
  for (uint64_t k = 0; k < kSymbols; ++k) b.words.push_back(events ? k : 100 + k);
  for (const char* symbol : {"A", "B", "C"}) b.string(symbol);
  std::vector<std::pair<std::string, size_t>> fields;
  const auto root = b.open(Op::kRecord);
  const auto add = [&](const char* name, size_t at) { fields.emplace_back(name, at); };
  add("id", leaf(b, Op::kLong, either({{0, 0}}, {{0, 0}})));
  add("name", leaf(b, Op::kString, either({{0, 1}}, {{4, 1}})));
  add("price", leaf(b, Op::kDouble, either({{2, 0}, {3, 2}}, {{3, 0}}), 0, 1));
  add("kind", leaf(b, Op::kEnum, either({{0, 3}}, {{2, 0}}), kSymbols));
  const auto tags = b.open(Op::kArray, 1);
  leaf(b, Op::kString, either({{1, 0}}, {}));
  b.close(tags);
  add("tags", tags);
  const auto stats = b.open(Op::kMap);
  leaf(b, Op::kLong);
  const auto looked_up = writing ? stats : leaf(b, Op::kLong, either({{2, 1}}, {}));
  b.close(stats);
  b.nodes[stats + 6] = static_cast<int64_t>(b.words.size());
  if (writing) {
    b.words.push_back(0);
  } else {
    b.words.insert(b.words.end(), {1, static_cast<uint64_t>(b.index(looked_up)), b.string("clicks")});
  }
  add("stats", stats);
  const auto any = b.open(Op::kUnion);
  const auto b0 = leaf(b, Op::kLong), b1 = leaf(b, Op::kString), b2 = leaf(b, Op::kNull);
  b.close(any);
  b.nodes[any + 6] = static_cast<int64_t>(b.words.size());
  for (const auto w : {int64_t{3}, b.index(b0), b.index(b1), b.index(b2)}) b.words.push_back(static_cast<uint64_t>(w));
  add("any", any);
  add("raw", leaf(b, Op::kFixed, either({{0, 4}}, {}), 3));
  add("ok", leaf(b, Op::kBool));
  add("count", leaf(b, Op::kInt, either({}, {{1, 0}})));
  add("blob", leaf(b, Op::kBytes));
  const auto items = b.open(Op::kArray, 5, 0, events);
  const auto element = b.open(Op::kRecord);
  const auto item = leaf(b, Op::kLong, either({{1, 1}}, {{0, 1}}));
  const auto w = leaf(b, Op::kFloat);
  b.close(element);
  b.close(items);
  add("items", items);
  b.close(root);
  if (writing) {
    const auto describe = [&](size_t record, const std::vector<std::pair<std::string, size_t>>& inside) {
      std::vector<uint64_t> words{inside.size()};
      for (const auto& [name, at] : inside) {
        words.insert(words.end(), {static_cast<uint64_t>(b.index(at)), b.string(name), 0});
      }
      b.nodes[record + 6] = static_cast<int64_t>(b.words.size());
      b.words.insert(b.words.end(), words.begin(), words.end());
    };
    describe(root, fields);
    describe(element, {{"item", item}, {"w", w}});
    for (size_t i = 0; i < b.nodes.size(); i += Program::kNodeFields) {
      if (b.nodes[i] != static_cast<int64_t>(Op::kEnum)) continue;
      b.nodes[i + 6] = static_cast<int64_t>(b.words.size());
      b.words.insert(b.words.end(), {kSymbols, 0});
    }
  }
  return b;
}

// A record read as another schema has it, with every kind of node that such a reading takes, for the same plans:
//
// record { id: decimal in fixed(9), name: int (refused)|string|null|fixed(16) as a UUID,
//          price: null|decimal(2) in bytes, kind: enum(4) of which one symbol is refused, tags: [bytes|null|int
//          (refused)], stats: not written, {"clicks": 9} by default, not_read: record R { n: long|null, in: [R|null] },
//          time: int in milliseconds for seconds, raw: not written, items: [ { item: int scaled by 1000, w: long as
//          float, gone: {string: double}, back: null|R written anew } ] }
inline Builder resolved_builder(For use) {
  using Sinks = std::vector<std::pair<uint64_t, uint64_t>>;
  const bool features = use == For::kFeatures, events = use == For::kEvents;
  const auto either = [&](Sinks f, Sinks e) { return features ? f : events ? e : Sinks{}; };
  Builder b;
  for (uint64_t k = 0; k < kSymbols + 1; ++k) b.words.push_back(events ? k % kSymbols : 100 + k);
  for (const char* symbol : {"A", "B", "C"}) b.string(symbol);
  const auto said = [&](std::vector<uint64_t> words) {
    const auto at = static_cast<int64_t>(b.words.size());
    b.words.insert(b.words.end(), words.begin(), words.end());
    return at;
  };
  const auto convert = [&](Conversion how, std::vector<uint64_t> words, const Sinks& sinks, int64_t null_branch = 0) {
    words.insert(words.begin(), static_cast<uint64_t>(how));
    const auto at = b.open(Op::kConvert, said(words), null_branch);
    const uint64_t symbols = how == Conversion::kSymbols ? kSymbols + 1 : 0;
    for (const auto& [kind, slot] : sinks) b.sink(kind, slot, 0, symbols);
    b.close(at);
    return at;
  };
  const auto united = [&](size_t at, const std::vector<size_t>& branches) {
    b.close(at);
    std::vector<uint64_t> words{branches.size()};
    for (const auto branch : branches) words.push_back(static_cast<uint64_t>(b.index(branch)));
    b.nodes[at + 6] = said(words);
  };
  const auto given = [&](const std::vector<uint8_t>& bytes) {
    return static_cast<int64_t>(b.string({bytes.begin(), bytes.end()}));
  };
  // A record inside itself; it is skipped.
  const auto recursive = [&](int64_t null_branch) {
    const auto record = b.open(Op::kRecord, 0, null_branch);
    leaf(b, Op::kLong, {}, 0, 2);
    const auto inside = b.open(Op::kArray, 1);
    leaf(b, Op::kRecursion, {}, b.index(record), 2);
    b.close(inside);
    b.close(record);
  };
  const auto root = b.open(Op::kRecord);
  convert(Conversion::kDecimal, {10, 0, 1}, either({{0, 0}}, {{0, 0}}));
  const auto name = b.open(Op::kUnion);
  const auto n0 = leaf(b, Op::kRefuse), n1 = leaf(b, Op::kString, either({{0, 1}}, {{4, 1}})), n2 = leaf(b, Op::kNull),
             n3 = convert(Conversion::kUuid, {}, either({{0, 1}}, {{4, 1}}));
  united(name, {n0, n1, n2, n3});
  convert(Conversion::kDecimal, {0, 2, 0}, either({{2, 0}, {3, 2}}, {{3, 0}}), 1);
  convert(Conversion::kSymbols, {kSymbols + 1, 0, 0, 0, 1}, either({{0, 3}}, {{2, 0}}));
  const auto tags = b.open(Op::kArray, 1);
  const auto tag = b.open(Op::kUnion);
  const auto t0 = leaf(b, Op::kBytes, either({{1, 0}}, {})), t1 = leaf(b, Op::kNull), t2 = leaf(b, Op::kRefuse);
  united(tag, {t0, t1, t2});
  b.close(tags);
  const auto stats = b.open(Op::kDefault, given({2, 12, 'c', 'l', 'i', 'c', 'k', 's', 18, 0}));
  const auto map = b.open(Op::kMap);
  leaf(b, Op::kLong);
  const auto clicks = convert(Conversion::kDoubleOfInt, {0}, either({{2, 1}}, {}));
  b.close(map);
  const auto key = b.string("clicks");
  b.nodes[map + 6] = said({1, static_cast<uint64_t>(b.index(clicks)), key});
  b.close(stats);
  recursive(0);
  convert(Conversion::kScaledInt, {1, 1, 1000}, either({}, {{1, 0}}));
  const auto raw = b.open(Op::kDefault, given({1, 2, 3}));
  leaf(b, Op::kFixed, either({{0, 4}}, {}), 3);
  b.close(raw);
  const auto items = b.open(Op::kArray, 4, 0, events);
  const auto element = b.open(Op::kRecord);
  convert(Conversion::kScaledInt, {0, 1000, 1}, either({{1, 1}}, {{0, 1}}));
  convert(Conversion::kFloatOfInt, {0}, {});
  const auto gone = b.open(Op::kMap);
  leaf(b, Op::kDouble);
  b.close(gone);
  b.nodes[gone + 6] = said({0});
  recursive(1);
  b.close(element);
  b.close(items);
  b.close(root);
  return b;
}

// A record that is read so.
inline std::vector<uint8_t> resolved_record() {
  std::vector<uint8_t> r;
  const auto text = [&](const std::string& s) { write_bytes(reinterpret_cast<const uint8_t*>(s.data()), s.size(), r); };
  const auto recursion = [&](int levels) {
    for (int i = 0; i < levels; ++i) {
      write_long(0, r);  // n: a long
      write_long(i, r);
      write_long(1, r);  // one inside
      write_long(0, r);
    }
    write_long(1, r);
    write_long(0, r);
    for (int i = 0; i < levels; ++i) write_long(0, r);
  };
  r.insert(r.end(), {0, 0, 0, 0, 0, 0, 0, 1, 2});
  write_long(3, r);
  r.insert(r.end(), {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
  write_long(1, r);
  text("\xFB\x2E");
  write_long(2, r);
  write_long(2, r);
  write_long(0, r);
  text("x");
  write_long(1, r);
  r.push_back(0);
  recursion(3);
  write_long(1'700'000'000, r);
  write_long(2, r);
  for (const int64_t item : {7, 8}) {
    write_long(item, r);
    write_long(1 << 30, r);
    write_long(1, r);
    text("k");
    write_raw(0.5, r);
    r.push_back(0);
    write_long(item - 7, r);
    if (item == 8) recursion(1);
  }
  r.push_back(0);
  return r;
}

inline DecodePlan plan() {
  DecodePlan p;
  p.groups = {{{false, 0}, {false, 1}, {true, 0}, {false, 5}},
              {{false, 2}, {false, 3}, {false, 4}, {true, 1}, {false, 6}}};
  p.columns = 7;
  p.list_max = {3, 100};
  p.log1p = {1, 0};
  p.times = {{5, TimePart::kHourOfWeek, 9}};
  p.crosses = {{6, 11, {0, 1}}};
  p.check();
  return p;
}

inline EventPlan event_plan() {
  EventPlan p;
  p.explode = p.has_id = true;
  p.part_in_element = {0, 1};
  p.column_is_hash = {0, 1};
  p.column_in_element = {0, 0};
  return p;
}

// A record of the schema.
inline std::vector<uint8_t> record() {
  std::vector<uint8_t> r;
  const auto text = [&](const std::string& s) { write_bytes(reinterpret_cast<const uint8_t*>(s.data()), s.size(), r); };
  write_long(-5, r);
  text("name");
  write_long(1, r);
  write_raw(2.5, r);
  write_long(2, r);
  write_long(2, r);
  text("x");
  text("");
  r.push_back(0);
  write_long(1, r);
  text("clicks");
  write_long(9, r);
  r.push_back(0);
  write_long(1, r);
  text("either");
  r.insert(r.end(), {1, 2, 3});
  r.push_back(1);
  write_long(1'700'000'000, r);
  text("blob");
  write_long(2, r);
  for (const int64_t item : {7, 8}) {
    write_long(item, r);
    write_raw(0.5f, r);
  }
  r.push_back(0);
  return r;
}

}  // namespace freshet::fixture
