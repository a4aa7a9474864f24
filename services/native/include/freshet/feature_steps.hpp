// The usual record read without looking its types up: a program's tree laid out as a row of steps, each a kind of field
// together with what becomes of it. What a step cannot read, or refuses, is left to the walker, which alone decides.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "freshet/avro_walk.hpp"
#include "freshet/feature_tile.hpp"
#include "freshet/hash.hpp"

namespace freshet {

// Bytes after a record that must be readable for `FeatureSteps::run`: no step looks further past a record's end.
inline constexpr ptrdiff_t kStepSlack = 16;

class FeatureSteps {
 public:
  // `program` must have been checked against the plan of the tiles to come, and outlive this.
  explicit FeatureSteps(const Program& program);

  // Read the record [begin, end) into the tile's present row. True: the walker would have accepted the record and
  // written the same. False: it may be bad, or only unusual; the row holds rubbish. end: at least kStepSlack bytes
  // after it are readable. walker: of the same program and tile.
  bool run(const uint8_t* begin, const uint8_t* end, FeatureTile& tile, Walker<FeatureTile>& walker) const;

 private:
  enum class Do : uint8_t {
    kPassBool,
    kPassInt,
    kPassLong,
    kPassFloat,
    kPassDouble,
    kPassBytes,  // read past, and checked as if wanted
    kKeyInt,
    kKeyLong,
    kKeyBytes,
    kKeyEnum,  // a key of its own column
    kDenseInt,
    kDenseLong,
    kDenseFloat,
    kDenseDouble,  // a number of its own column
    kRecord,       // of a nullable one, its branch
    kWalk,         // all else: left to the walker
  };

  struct Step {
    Do what;
    uint8_t value_branch = 0;  // of a nullable: the byte before a value, 0 or 2; a null's is 2 - this
    bool nullable = false;
    uint32_t slot = 0;       // of a key: place in FeatureTile::keys(); of a number: in dense()
    uint32_t arg = 0;        // kKeyEnum: symbols; kRecord: the step after it; kWalk: the node
    xxh3::ShortSeeds seeds;  // kKeyBytes
    uint64_t salt = 0;
    const uint64_t* symbol_keys = nullptr;
  };

  void add(uint32_t begin, uint32_t end, const Program& program);
  static Step leaf(uint32_t node, const Program& program);

  std::vector<Step> steps_;
};

}  // namespace freshet
