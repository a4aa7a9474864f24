// Rows to and from pages of Redis hashes.
#include <gtest/gtest.h>

#include <string>

#include "freshet/redis_pages.hpp"

namespace freshet {
namespace {

RecordWidths widths() {
  RecordWidths out{};
  out[0] = 3, out[7] = 12;
  return out;
}

void add(RunColumns& runs, uint32_t bucket, uint32_t table, std::vector<uint64_t> keys, uint32_t removed) {
  const uint32_t rows = static_cast<uint32_t>(keys.size()) - removed, width = widths()[table];
  RunEntry run{bucket, table, rows, removed, runs.body.size(), 0, 0};
  uint8_t* bytes = runs.body.extend(run.bytes(width));
  std::memcpy(bytes, keys.data(), 8 * keys.size());
  for (size_t i = 0; i < size_t{rows} * width; i++) bytes[8 * keys.size() + i] = static_cast<uint8_t>('a' + i);
  seal(run, bytes, width);
  runs.directory.push_back(run);
}

// Two rows and a removed key of table 0 and a row of table 7 in bucket 2, one row in bucket 5; nothing in bucket 3.
RunColumns some_runs() {
  RunColumns runs;
  add(runs, 2, 0, {1, 258, 3}, 1);
  add(runs, 2, 7, {5}, 0);
  add(runs, 5, 0, {9}, 0);
  return runs;
}

template <typename T>
std::string bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string bulk(const std::string& text) { return "$" + std::to_string(text.size()) + "\r\n" + text + "\r\n"; }

PageWrites write(const RunColumns& runs, std::vector<int64_t> buckets, bool whole, uint32_t page_bytes,
                 std::string* why = nullptr) {
  PageWrites out;
  const std::vector<int64_t> seqs(buckets.size(), 4);
  const std::string fault = page_writes(runs.view(), widths(), buckets, seqs, whole, page_bytes, out);
  if (why) *why = fault;
  return out;
}

TEST(PageWrites, AreTheArgumentsThatAClientWouldSend) {
  const RunColumns runs = some_runs();
  const PageWrites out = write(runs, {2, 3, 5}, false, 1000);
  std::string expected;
  const auto page = [&](size_t i, PageName name) {
    const RunEntry& run = runs.directory[i];
    const PageHead head{run.rows, run.removed, run.keys_crc, run.records_crc};
    const uint8_t* body = runs.view().of(run);
    expected += bulk(bytes_of(name)) + bulk(bytes_of(head) + std::string(body, body + run.bytes(widths()[run.table])));
  };
  page(0, {4, 0, 0, 1, 258});
  page(1, {4, 1, 7, 5, 5});
  page(2, {4, 0, 0, 9, 9});
  EXPECT_EQ(std::string(out.arguments.begin(), out.arguments.end()), expected);
  EXPECT_EQ(out.pages, (std::vector<int64_t>{2, 0, 1}));
  EXPECT_EQ(out.ends.back(), static_cast<int64_t>(expected.size()));
}

TEST(PageWrites, AreCutAndThoseOfAWholeBucketAreKnownAsSuch) {
  const PageWrites out = write(some_runs(), {2, 3, 5}, true, 16 + 15);
  EXPECT_EQ(out.pages, (std::vector<int64_t>{4, 0, 1}));  // two rows, a removed key, and one row that is longer
  PageName name;
  std::memcpy(&name, out.arguments.data() + 5, sizeof name);
  EXPECT_EQ(name.part, page_of_all);
}

TEST(PageWrites, AreRefusedForABucketThatIsNotNamed) {
  std::string why;
  write(some_runs(), {2, 3}, false, 1000, &why);
  EXPECT_NE(why, "");
  write(some_runs(), {3, 2}, false, 1000, &why);
  EXPECT_NE(why, "");
}

struct Items {
  std::vector<std::string> texts;
  std::vector<std::span<const uint8_t>> spans;
  explicit Items(std::vector<std::string> given) : texts(std::move(given)) {
    for (const std::string& t : texts) spans.push_back({reinterpret_cast<const uint8_t*>(t.data()), t.size()});
  }
};

std::string read(const Items& items, RunColumns& out) {
  const PagesOfBucket pages{4, items.spans};
  size_t failed = 0;
  return runs_of_pages({&pages, 1}, widths(), 1 << 20, out, failed);
}

std::string name(uint32_t table) { return bytes_of(PageName{1, 0, table, 0, 0}); }

TEST(RunsOfPages, SayWhatIsNoPage) {
  RunColumns out;
  EXPECT_NE(read(Items({name(0)}), out).find("without a value"), std::string::npos);
  EXPECT_NE(read(Items({"short", "abc"}), out).find("5 bytes, expected 32"), std::string::npos);
  EXPECT_NE(read(Items({name(1), "abc"}), out).find("table 1"), std::string::npos);
  EXPECT_NE(read(Items({name(99999), "abc"}), out).find("table 99999"), std::string::npos);
  EXPECT_NE(read(Items({name(0), "abc"}), out).find("shorter than its head"), std::string::npos);
  EXPECT_NE(read(Items({name(0), bytes_of(PageHead{1, 0, 0, 0}) + "abc"}), out).find("19 bytes, expected 27"),
            std::string::npos);
  const std::string huge = bytes_of(PageHead{~0u, ~0u, 0, 0}) + "abc";
  EXPECT_NE(read(Items({name(7), huge}), out).find("19 bytes, expected"), std::string::npos);
  EXPECT_NE(read(Items({name(0), bytes_of(PageHead{1, 0, 0, 0}) + "12345678abc"}), out).find("CRC"), std::string::npos);
}

}  // namespace
}  // namespace freshet
