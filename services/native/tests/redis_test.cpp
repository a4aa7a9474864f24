// Rows to and from the fields of Redis hashes.
#include <gtest/gtest.h>

#include <string>

#include "freshet/redis_hash.hpp"

namespace freshet {
namespace {

RecordWidths widths() {
  RecordWidths out{};
  out[0] = 3, out[7] = 12;
  return out;
}

// Two rows and a removed key of table 0 and a row of table 7 in bucket 2, one row in bucket 5; nothing in bucket 3.
RunColumns some_runs() {
  RunColumns runs;
  const auto add = [&](u32 bucket, u32 table, std::vector<u64> keys, u32 removed) {
    const u32 rows = static_cast<u32>(keys.size()) - removed, width = widths()[table];
    RunEntry run{bucket, table, rows, removed, runs.body.size(), 0, 0};
    u8* bytes = runs.body.extend(run.bytes(width));
    std::memcpy(bytes, keys.data(), 8 * keys.size());
    for (size_t i = 0; i < size_t{rows} * width; i++) bytes[8 * keys.size() + i] = static_cast<u8>('a' + i);
    seal(run, bytes, width);
    runs.directory.push_back(run);
  };
  add(2, 0, {1, 258, 3}, 1);
  add(2, 7, {5}, 0);
  add(5, 0, {9}, 0);
  return runs;
}

std::string field(u8 table, u64 key) {
  std::string out(1, static_cast<char>(table));
  out.append(reinterpret_cast<const char*>(&key), 8);
  return out;
}

std::string bulk(const std::string& text) { return "$" + std::to_string(text.size()) + "\r\n" + text + "\r\n"; }

std::string text(const Column<u8>& bytes) { return {bytes.begin(), bytes.end()}; }

HashWrites write(const RunColumns& runs, std::vector<i64> buckets, u32 rows_per_command, std::string* why = nullptr) {
  const std::string keys = "k2k3k5";
  const std::vector<i64> ends = {2, 4, 6};
  HashWrites out;
  const std::string fault = hash_writes(runs.view(), widths(), buckets,
                                        {{reinterpret_cast<const u8*>(keys.data()), keys.size()}, {ends.data(), buckets.size()}},
                                        rows_per_command, out);
  if (why) *why = fault;
  return out;
}

TEST(HashWrites, AreTheCommandsThatAClientWouldSend) {
  const HashWrites out = write(some_runs(), {2, 3, 5}, 2);
  const std::string of_2 = "*6\r\n" + bulk("HSET") + bulk("k2") + bulk(field(0, 1)) + bulk("abc") + bulk(field(0, 258)) +
                           bulk("def") + "*4\r\n" + bulk("HSET") + bulk("k2") + bulk(field(7, 5)) + bulk("abcdefghijkl");
  const std::string of_5 = "*4\r\n" + bulk("HSET") + bulk("k5") + bulk(field(0, 9)) + bulk("abc");
  EXPECT_EQ(text(out.sets), of_2 + of_5);
  const i64 end = static_cast<i64>(of_2.size());
  EXPECT_EQ(out.set_ends, (std::vector<i64>{end, end, static_cast<i64>(of_2.size() + of_5.size())}));
  EXPECT_EQ(out.set_commands, (std::vector<i64>{2, 0, 1}));
  EXPECT_EQ(text(out.removed), bulk(field(0, 3)));
  EXPECT_EQ(out.removed_fields, (std::vector<i64>{1, 0, 0}));
  EXPECT_EQ(out.removed_ends, (std::vector<i64>{15, 15, 15}));
}

TEST(HashWrites, OneCommandHoldsRowsOfSeveralTables) {
  EXPECT_EQ(write(some_runs(), {2, 3, 5}, 500).set_commands, (std::vector<i64>{1, 0, 1}));
}

TEST(HashWrites, AreRefusedForABucketWithoutAKey) {
  std::string why;
  write(some_runs(), {2, 3}, 2, &why);
  EXPECT_NE(why, "");
  write(some_runs(), {3, 2}, 2, &why);
  EXPECT_NE(why, "");
}

struct Items {
  std::vector<std::string> texts;
  std::vector<std::span<const u8>> spans;
  explicit Items(std::vector<std::string> given) : texts(std::move(given)) {
    for (const std::string& t : texts) spans.push_back({reinterpret_cast<const u8*>(t.data()), t.size()});
  }
};

std::string read(const Items& items, RunColumns& out, u64 most_bytes = 1 << 20) {
  const HashRows hash{4, items.spans};
  size_t failed = 0;
  return runs_of_hashes({&hash, 1}, widths(), most_bytes, out, failed);
}

TEST(RunsOfHashes, AreSortedAndSealedAndHaveEachRowOnce) {
  RunColumns out;
  const Items items({field(7, 1), "abcdefghijkl", field(0, 9), "xyz", field(0, 2), "uvw", field(0, 9), "xyz"});
  ASSERT_EQ(read(items, out), "");
  ASSERT_EQ(out.directory.size(), 2u);
  EXPECT_EQ(runs_fault(out.view(), widths()), "");
  for (const RunEntry& run : out.directory) {
    EXPECT_EQ(run.bucket, 4u);
    EXPECT_EQ(keys_fault(out.view(), run), "");
    EXPECT_EQ(records_fault(out.view(), run, widths()[run.table]), "");
  }
  EXPECT_EQ(out.directory[0].rows, 2u);
  EXPECT_EQ(std::string(out.body.begin() + 16, out.body.begin() + 22), "uvwxyz");
}

TEST(RunsOfHashes, AreCut) {
  RunColumns out;
  ASSERT_EQ(read(Items({field(0, 1), "abc", field(0, 2), "def", field(0, 3), "ghi"}), out, 22), "");
  EXPECT_EQ(out.directory.size(), 2u);
}

TEST(RunsOfHashes, SayWhatIsNoRow) {
  RunColumns out;
  EXPECT_NE(read(Items({field(0, 1)}), out).find("without a value"), std::string::npos);
  EXPECT_NE(read(Items({"short", "abc"}), out).find("5 bytes, expected 9"), std::string::npos);
  EXPECT_NE(read(Items({field(1, 1), "abc"}), out).find("table 1"), std::string::npos);
  EXPECT_NE(read(Items({field(0, 1), "abcd"}), out).find("4 bytes, expected 3"), std::string::npos);
}

}  // namespace
}  // namespace freshet
