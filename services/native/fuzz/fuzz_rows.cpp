// Packed rows as a row store or the network hands them over: taken whole, or refused without a trace.
#include <cstdlib>
#include <stdexcept>

#include "../tests/table_support.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace freshet;
  if (size < 2) return 0;
  const bool half = data[0] & 1;
  const uint8_t table = data[0] >> 1 & 1;
  const size_t claimed = data[1];  // added to the true size of a row: mostly none
  data += 2;
  size -= 2;
  Store store(testing::spec_of(testing::mixed_slots(), 4, 1, half));
  const size_t packed = store.layout(0).packed_bytes();
  const size_t n = size / packed;
  const std::vector<uint64_t> keys = testing::numbered(1, n + 1);
  const uint8_t* records = data;
  try {
    store.import_rows(table, keys.data(), records, n, packed + (claimed > 250 ? claimed - 250 : 0));
  } catch (const std::invalid_argument&) {
    if (store.rows(0) + store.rows(1) != 0) std::abort();
    return 0;
  }
  std::vector<uint8_t> out(n * packed), found(n);
  store.export_rows(table, keys.data(), n, out.data(), found.data());
  for (const uint8_t f : found)
    if (!f) std::abort();
  const testing::Batch batch(keys, 4);
  const std::vector<float> gradients(batch.plan.unique() * store.layout(0).width(), 0.5f);
  testing::push(store, batch, 0, 0, gradients);
  store.collect_flush(testing::all_buckets(store), true);
  return 0;
}
