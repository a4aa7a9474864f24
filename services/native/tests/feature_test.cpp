// The walker, the decoder, events, JSON, columns and blocks, from C++: the parts that Python's oracles do not reach.
#include <gtest/gtest.h>

#include <cmath>

#include "avro_fixture.hpp"
#include "freshet/avro_columns.hpp"
#include "freshet/avro_validate.hpp"
#include "freshet/block.hpp"
#include "freshet/hash.hpp"
#include "freshet/json_avro.hpp"
#include "freshet/murmur.hpp"

namespace freshet {
namespace {

using fixture::For;

std::vector<int64_t> one(const std::vector<uint8_t>& r) { return {static_cast<int64_t>(r.size())}; }

TEST(Features, EveryPrefixOfARecordIsRefusedAndTheWholeIsRead) {
  const Program program = fixture::builder(For::kFeatures).build();
  const Program* programs[] = {&program};
  const auto record = fixture::record();
  for (size_t n = 0; n < record.size(); ++n) {
    const std::vector<uint8_t> cut(record.begin(), record.begin() + static_cast<ptrdiff_t>(n));
    const auto got = decode_features(fixture::plan(), programs, {}, cut, one(cut), std::vector<int64_t>{0}, false);
    EXPECT_EQ(got.bad.size(), 1u) << n;
    EXPECT_EQ(got.size, 0u);
  }
  const auto got = decode_features(fixture::plan(), programs, {}, record, one(record), std::vector<int64_t>{0}, false);
  ASSERT_EQ(got.size, 1u);
  EXPECT_EQ(got.groups[0].keys.data[0], key_of_int(-5, 7));
  EXPECT_EQ(got.groups[0].feature_starts, (std::vector<uint32_t>{0, 1, 2, 4, 5}));
  EXPECT_EQ(got.dense.data[0], static_cast<float>(std::log1p(2.5)));
  EXPECT_EQ(got.dense.data[1], 9.0f);
}

TEST(Features, ABadRecordLeavesNoTraceInItsNeighbours) {
  const Program program = fixture::builder(For::kFeatures).build();
  const Program* programs[] = {&program};
  const auto good = fixture::record();
  std::vector<uint8_t> bytes(good.begin(), good.end() - 1);  // all its values, then no end of the array
  std::vector<int64_t> ends{static_cast<int64_t>(bytes.size())};
  bytes.insert(bytes.end(), good.begin(), good.end());
  ends.push_back(static_cast<int64_t>(bytes.size()));
  const auto both = decode_features(fixture::plan(), programs, {}, bytes, ends, std::vector<int64_t>{5, 0}, false);
  const auto alone = decode_features(fixture::plan(), programs, {}, good, one(good), std::vector<int64_t>{0}, false);
  ASSERT_EQ(both.size, 1u);
  for (size_t g = 0; g < both.groups.size(); ++g) {
    ASSERT_EQ(both.groups[g].keys.size, alone.groups[g].keys.size);
    for (size_t i = 0; i < alone.groups[g].keys.size; ++i)
      EXPECT_EQ(both.groups[g].keys.data[i], alone.groups[g].keys.data[i]);
  }
}

// A record with bytes after it is read by steps, one at the buffer's end by the walker: both must read the same.
TEST(Features, ARecordIsReadAlikeAtTheEndOfABufferAndBeforeIt) {
  const Program program = fixture::builder(For::kFeatures).build();
  const Program* programs[] = {&program};
  const auto good = fixture::record();
  size_t refused = 0;
  for (size_t at = 0; at < good.size(); ++at) {
    for (const int value : {0, 1, 2, 3, 4, 0x7F, 0x80, 0x81, 0xFE, 0xFF, good[at] ^ 0x40}) {
      auto changed = good;
      changed[at] = static_cast<uint8_t>(value);
      auto both = changed;
      both.insert(both.end(), good.begin(), good.end());
      const std::vector<int64_t> ends{static_cast<int64_t>(good.size()), static_cast<int64_t>(both.size())};
      const auto walked =
          decode_features(fixture::plan(), programs, {}, changed, one(changed), std::vector<int64_t>{3}, false);
      const auto stepped =
          decode_features(fixture::plan(), programs, {}, both, ends, std::vector<int64_t>{3, 3}, false);
      ASSERT_EQ(stepped.size, walked.size + 1);
      refused += walked.bad.size();
      if (walked.size == 0) {
        EXPECT_EQ(stepped.bad[0].failure.why, walked.bad[0].failure.why);
        EXPECT_EQ(stepped.bad[0].failure.offset, walked.bad[0].failure.offset);
        continue;
      }
      for (size_t g = 0; g < walked.groups.size(); ++g) {
        for (size_t f = 0; f < walked.groups[g].lists.size(); ++f) {
          const auto of = [&](const DecodedBatch& b) { return b.groups[g].keys.data[b.groups[g].feature_starts[f]]; };
          EXPECT_EQ(of(walked), of(stepped)) << at << " " << value << " feature " << f;
        }
      }
      for (size_t d = 0; d < 2; ++d) {
        EXPECT_EQ(std::bit_cast<uint32_t>(walked.dense.data[d]), std::bit_cast<uint32_t>(stepped.dense.data[d]));
      }
    }
  }
  EXPECT_GT(refused, 20u);
}

TEST(Features, RowsOfSeveralTilesAreTheRowsOfEach) {
  const Program program = fixture::builder(For::kFeatures).build();
  const Program* programs[] = {&program};
  for (const size_t n : {7u, 8u, 9u, 30u}) {
    std::vector<uint8_t> bytes;
    std::vector<int64_t> ends, times;
    for (size_t r = 0; r < n; ++r) {
      auto record = fixture::record();
      record[0] = static_cast<uint8_t>(2 * r);  // id: r
      if (r == 3) record.pop_back();
      bytes.insert(bytes.end(), record.begin(), record.end());
      ends.push_back(static_cast<int64_t>(bytes.size()));
      times.push_back(static_cast<int64_t>(r) * 3'600'000);
    }
    const auto got = decode_features(fixture::plan(), programs, {}, bytes, ends, times, false);
    ASSERT_EQ(got.size, n - 1);
    ASSERT_EQ(got.bad.size(), 1u);
    const auto& group = got.groups[0];
    for (size_t r = 0; r + 1 < n; ++r) {
      const auto id = static_cast<int64_t>(r < 3 ? r : r + 1);
      EXPECT_EQ(group.keys.data[r], key_of_int(id, 7));
      EXPECT_EQ(group.keys.data[group.feature_starts[3] + r],
                key_of_int(time_part(id * 3'600'000, TimePart::kHourOfWeek), 9));
    }
  }
}

TEST(Features, TimePartsAreThoseOfTheUtcWeek) {
  EXPECT_EQ(time_part(0, TimePart::kWeekday), 3);  // a Thursday
  EXPECT_EQ(time_part(0, TimePart::kHour), 0);
  EXPECT_EQ(time_part(-1, TimePart::kHour), 23);
  EXPECT_EQ(time_part(-1, TimePart::kWeekday), 2);
  EXPECT_EQ(time_part(4 * 86'400'000ll + 3'600'000, TimePart::kHourOfWeek), 1);
  EXPECT_EQ(time_part(INT64_MIN, TimePart::kHour) / 24, 0);
}

TEST(Features, Log1pIsRoundedLikeTheLibrarysAndOdd) {
  const std::vector<uint8_t> mask{1, 0, 1};
  for (float x = 1e-30f; x < 1e38f; x *= 1.7f) {
    std::vector<float> v{x, x, -x};
    log1p_columns(v.data(), 1, mask);
    EXPECT_NEAR(v[0], std::log1p(static_cast<double>(x)), 1e-7 * std::log1p(static_cast<double>(x)));
    EXPECT_EQ(v[1], x);
    EXPECT_EQ(v[2], -v[0]);
  }
  std::vector<float> v{0.0f, 0.0f, NAN};
  log1p_columns(v.data(), 1, mask);
  EXPECT_EQ(v[0], 0.0f);
  EXPECT_TRUE(std::isnan(v[2]));
}

TEST(Programs, WhatPointsOutsideIsRefused) {
  const auto base = fixture::builder(For::kFeatures);
  for (size_t i = 0; i < base.nodes.size(); ++i) {
    for (const int64_t wrong : {int64_t{-1}, int64_t{1} << 40}) {
      auto changed = base;
      changed.nodes[i] = wrong;
      const bool is_flag = i % Program::kNodeFields == 2;  // any number but 0 is true
      if (!is_flag) {
        EXPECT_THROW(changed.build(), std::invalid_argument) << i;
      }
    }
  }
}

TEST(Events, ElementsAreCutOutWithTheirPrefixAndSuffix) {
  const Program program = fixture::builder(For::kEvents).build();
  const auto record = fixture::record();
  const auto got = extract_events(fixture::event_plan(), program, record, one(record), false);
  ASSERT_EQ(got.event_index.size(), 2u);
  EXPECT_EQ(got.times_ms[0], 1'700'000'000'000);
  const auto [prefix, prefix_end, start, end, suffix, suffix_end] = got.spans[1];
  EXPECT_EQ(prefix, 0);
  EXPECT_EQ(end - start, 5);
  EXPECT_EQ(suffix_end, static_cast<int64_t>(record.size()));
  EXPECT_EQ(suffix, suffix_end);
  EXPECT_LT(prefix_end, start);
  EXPECT_NE(got.impressions[0].high, got.impressions[1].high);
}

TEST(Json, WhatIsWrittenIsAvroOfTheSchema) {
  const WriterSchema schema(fixture::builder(For::kWriting).build());
  const Program reader = fixture::builder(For::kNothing).build();
  const std::string text =
      R"({"id": 1, "name": "n", "kind": "B", "tags": ["x"], "stats": {"a": 1}, "any": "t", "raw": "abc", "ok": true,
          "count": 1, "blob": "", "items": [{"item": 1, "w": 0.5}]})";
  const std::vector<uint8_t> bytes(text.begin(), text.end());
  const auto made = transcode_body(schema, bytes, {}, 1000);
  ASSERT_EQ(made.events.size(), 1u) << made.bad.front().path;
  EXPECT_TRUE(validate_avro(reader, made.records.data, made.records.ends, false).empty());
}

TEST(Columns, AColumnThatCannotHoldItsFieldIsRefusedBeforeAnythingIsWritten) {
  const WriterSchema schema(fixture::builder(For::kWriting).build());
  std::vector<int32_t> source_of(schema.nodes().size(), kNoColumn);
  source_of[0] = kPassedThrough;
  EXPECT_THROW(encode_columns(schema, {}, source_of, 1), std::invalid_argument);
}

TEST(Hashes, AnEmptyStringHasAKeyAndHalvesOfAnIdentityDiffer) {
  EXPECT_NE(key_of_bytes(nullptr, 0, 0), kAbsentKey);
  const Hash128 h = hash128_of_int(0);
  EXPECT_NE(h.high, h.low);
}

TEST(Hashes, StringsOf4To16BytesAreHashedAlikeByTheWayWithoutBranches) {
  std::vector<uint8_t> bytes(24);
  for (uint64_t seed = 1; seed < 100; ++seed) {
    for (auto& b : bytes) b = static_cast<uint8_t>(mix64(seed * 31 + static_cast<uint64_t>(&b - bytes.data())));
    const uint64_t salt = mix64(seed);
    for (size_t n = 4; n <= 16; ++n) {
      EXPECT_EQ(xxh3::from_4_to_16(bytes.data(), n, xxh3::ShortSeeds(salt)), xxh3_64(bytes.data(), n, salt)) << n;
    }
  }
}

TEST(Murmur2, EqualsKafkasPublishedValues) {
  const std::string key = "a-little-bit-longer-string";
  EXPECT_EQ(static_cast<int32_t>(murmur2(reinterpret_cast<const uint8_t*>(key.data()), key.size())), -1486304829);
}

TEST(Blocks, ChecksumsOfAllLengthsAreThoseOfTheTables) {
  std::vector<uint8_t> bytes(300);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 37);
  EXPECT_EQ(block_crc32(reinterpret_cast<const uint8_t*>("123456789"), 9), 0xCBF43926u);
  for (size_t n = 0; n <= bytes.size(); ++n) {  // in pieces too short for the fast way, then whole
    uint32_t crc = 0;
    for (size_t i = 0; i < n; ++i) crc = block_crc32(bytes.data() + i, 1, crc);
    EXPECT_EQ(block_crc32(bytes.data(), n), crc) << n;
  }
}

}  // namespace
}  // namespace freshet
