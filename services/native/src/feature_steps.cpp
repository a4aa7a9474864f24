#include "freshet/feature_steps.hpp"

#include <bit>

namespace freshet {
namespace {

constexpr uint64_t kTops = 0x8080808080808080ull;  // of a varint's bytes: set where another follows

// 8 bytes' low 7 bits each, pushed together.
inline uint64_t pushed_together(uint64_t v) {
  v &= ~kTops;
  v = (v & 0x007F007F007F007Full) | (v & 0x7F007F007F007F00ull) >> 1;
  v = (v & 0x00003FFF00003FFFull) | (v & 0x3FFF00003FFF0000ull) >> 2;
  return (v & 0x0FFFFFFFull) | (v & 0x0FFFFFFF00000000ull) >> 4;
}

// Reads an unsigned varint; returns where it ends, or `refused` if it has more than 10 bytes or 64 bits.
// p: 10 bytes are readable.
inline const uint8_t* varint(const uint8_t* p, uint64_t& value, const uint8_t* refused) {
  const uint64_t word = read_u64(p);
  const uint64_t stops = ~word & kTops;
  if (stops != 0) [[likely]] {
    value = pushed_together(word & (stops ^ (stops - 1)));  // the bytes up to the first that none follows
    return p + (std::countr_zero(stops) >> 3) + 1;
  }
  value = pushed_together(word) | static_cast<uint64_t>(p[8] & 0x7F) << 56;
  if (p[8] < 0x80) return p + 9;
  value |= static_cast<uint64_t>(p[9]) << 63;
  return p[9] <= 1 ? p + 10 : refused;
}

inline int64_t zigzag(uint64_t raw) { return static_cast<int64_t>(raw >> 1) ^ -static_cast<int64_t>(raw & 1); }

inline bool is_int(uint64_t raw) { return raw <= UINT32_MAX; }  // zigzagged

// Reads a length that fits the rest of the record, or refuses it: then n is 0.
inline const uint8_t* length(const uint8_t* p, const uint8_t* end, uint64_t& n, const uint8_t* refused) {
  uint64_t raw = *p;
  if (raw < 0x80) [[likely]] {  // foreseen, so that reading on need not wait for it
    ++p;
  } else {
    p = varint(p, raw, refused);
  }
  const bool fits = p <= end && !(raw & 1) && raw >> 1 <= static_cast<uint64_t>(end - p);
  n = fits ? raw >> 1 : 0;
  return fits ? p : refused;
}

}  // namespace

FeatureSteps::FeatureSteps(const Program& program) {
  steps_.reserve(program.nodes().size());
  add(1, program.nodes()[0].end, program);
}

void FeatureSteps::add(uint32_t begin, uint32_t end, const Program& program) {
  const auto& nodes = program.nodes();
  for (uint32_t i = begin; i < end; i = nodes[i].end) {
    const Node& node = nodes[i];
    const size_t at = steps_.size();
    if (node.op != Op::kRecord || node.null_branch) {
      Step step = leaf(i, program);
      step.nullable = node.null_branch != 0 && step.what != Do::kWalk;  // the walker reads the branch itself
      step.value_branch = node.null_branch == 1 ? 2 : 0;
      steps_.push_back(step);
    }
    if (node.op == Op::kRecord) {
      add(i + 1, node.end, program);
      if (node.null_branch) steps_[at].arg = static_cast<uint32_t>(steps_.size());
    }
  }
}

FeatureSteps::Step FeatureSteps::leaf(uint32_t i, const Program& program) {
  const Node& node = program.nodes()[i];
  Step step{};
  step.what = Do::kWalk;
  step.arg = i;
  if (node.op == Op::kRecord) step.what = Do::kRecord;
  if (node.sink_begin == node.sink_end) {
    switch (node.op) {
      case Op::kBool:
        step.what = Do::kPassBool;
        break;
      case Op::kInt:
        step.what = Do::kPassInt;
        break;
      case Op::kLong:
        step.what = Do::kPassLong;
        break;
      case Op::kFloat:
        step.what = Do::kPassFloat;
        break;
      case Op::kDouble:
        step.what = Do::kPassDouble;
        break;
      case Op::kBytes:
      case Op::kString:
        step.what = Do::kPassBytes;
        break;
      default:
        break;
    }
    return step;
  }
  const Sink& sink = program.sinks()[node.sink_begin];
  if (node.sink_end - node.sink_begin > 1) return step;
  if (static_cast<FeatureSink>(sink.kind) == FeatureSink::kKey) {
    step.slot = static_cast<uint32_t>(sink.slot * kTileRows);
    step.salt = sink.salt;
    step.seeds = xxh3::ShortSeeds(sink.salt);
    step.symbol_keys = program.words().data() + sink.words_begin;
    switch (node.op) {
      case Op::kInt:
        step.what = Do::kKeyInt;
        break;
      case Op::kLong:
        step.what = Do::kKeyLong;
        break;
      case Op::kBytes:
      case Op::kString:
        step.what = Do::kKeyBytes;
        break;
      case Op::kEnum:
        if (sink.words_size != node.arg) break;
        step.what = Do::kKeyEnum;
        step.arg = node.arg;
        break;
      default:
        break;
    }
  } else if (static_cast<FeatureSink>(sink.kind) == FeatureSink::kDense) {
    step.slot = sink.slot;
    switch (node.op) {
      case Op::kInt:
        step.what = Do::kDenseInt;
        break;
      case Op::kLong:
        step.what = Do::kDenseLong;
        break;
      case Op::kFloat:
        step.what = Do::kDenseFloat;
        break;
      case Op::kDouble:
        step.what = Do::kDenseDouble;
        break;
      default:
        break;
    }
  }
  return step;
}

bool FeatureSteps::run(const uint8_t* p, const uint8_t* const end, FeatureTile& tile,
                       Walker<FeatureTile>& walker) const {
  uint64_t* const keys = tile.keys();
  float* const dense = tile.dense();
  const uint8_t* const refused = end + 1;  // where no good record leads
  walker.begin(end);
  const Step* const stop = steps_.data() + steps_.size();
  // The place in the record is checked after every step; within one at most kStepSlack bytes are read past it, or as
  // many as a length says that was checked.
  for (const Step* step = steps_.data(); step < stop; ++step) {
    uint64_t raw = 0;
    if (step->nullable) {
      const uint8_t branch = *p++;
      if (branch != step->value_branch) {
        if (branch != 2 - step->value_branch || p > end) return false;
        if (step->what == Do::kRecord) step = steps_.data() + step->arg - 1;
        continue;
      }
    }
    switch (step->what) {
      case Do::kPassBool:
        if (*p++ > 1) p = refused;
        break;
      case Do::kPassInt:
        p = varint(p, raw, refused);
        if (!is_int(raw)) p = refused;
        break;
      case Do::kPassLong:
        p = varint(p, raw, refused);
        break;
      case Do::kPassFloat:
        p += 4;
        break;
      case Do::kPassDouble:
        p += 8;
        break;
      case Do::kPassBytes:
        p = length(p, end, raw, refused) + raw;
        break;
      case Do::kKeyInt:
        p = varint(p, raw, refused);
        if (!is_int(raw)) p = refused;
        keys[step->slot] = key_of_int(zigzag(raw), step->salt);
        break;
      case Do::kKeyLong:
        p = varint(p, raw, refused);
        keys[step->slot] = key_of_int(zigzag(raw), step->salt);
        break;
      case Do::kKeyBytes:
        p = length(p, end, raw, refused);
        if (p > end) return false;
        keys[step->slot] =
            raw - 4 <= 12 ? not_absent(xxh3::from_4_to_16(p, raw, step->seeds)) : key_of_bytes(p, raw, step->salt);
        p += raw;
        break;
      case Do::kKeyEnum:
        p = varint(p, raw, refused);
        if ((raw & 1) || raw >> 1 >= step->arg) return false;
        keys[step->slot] = step->symbol_keys[raw >> 1];
        break;
      case Do::kDenseInt:
        p = varint(p, raw, refused);
        if (!is_int(raw)) p = refused;
        dense[step->slot] = static_cast<float>(static_cast<double>(zigzag(raw)));
        break;
      case Do::kDenseLong:
        p = varint(p, raw, refused);
        dense[step->slot] = static_cast<float>(static_cast<double>(zigzag(raw)));
        break;
      case Do::kDenseFloat:
        dense[step->slot] = FeatureTile::finite(std::bit_cast<float>(read_u32(p)));
        p += 4;
        break;
      case Do::kDenseDouble:
        dense[step->slot] = FeatureTile::finite(static_cast<float>(std::bit_cast<double>(read_u64(p))));
        p += 8;
        break;
      case Do::kRecord:
        break;
      case Do::kWalk:
        if (!(p = walker.walk_node(step->arg, p))) return false;
        break;
    }
    if (p > end) return false;
  }
  return p == end;
}

}  // namespace freshet
