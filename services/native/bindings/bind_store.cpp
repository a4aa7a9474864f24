#include <nanobind/stl/optional.h>
#include <nanobind/stl/set.h>

#include <tuple>

#include "freshet/store.hpp"
#include "runs_view.hpp"
#include "slots.hpp"

namespace freshet {

namespace {

using GroupTuple = std::tuple<std::vector<uint8_t>, std::vector<SlotTuple>, bool>;
using TableTuple = std::tuple<uint8_t, int64_t, int64_t, uint32_t>;
using PushTuple = std::tuple<uint32_t, In<uint64_t>, In<uint8_t>, In<uint32_t>, In2<float>>;

// The store as Python has it. The GIL is released while its memory is freed, which takes the system 10 to 30 ms a
// gigabyte, and more in small pages.
struct OwnedStore : Store {
  using Store::Store;
  ~OwnedStore() {
    const nb::gil_scoped_release release;
    free_rows();
  }
};

constexpr int64_t kAnswered = -1, kRowsUnread = -2;  // of lookups, which else return the bucket that is not held

void expect(bool ok, const char* what) {
  if (!ok) throw nb::value_error(what);
}

void make(OwnedStore* self, const std::vector<GroupTuple>& groups, const std::vector<TableTuple>& tables,
          uint32_t buckets, uint32_t partitions, uint64_t seed, bool serving, bool publish_rows, bool flush_rows,
          bool held) {
  StoreSpec spec;
  for (const auto& [ids, slots, half] : groups) {
    spec.groups.push_back({ids, slots_of(slots), half});
  }
  for (const auto& [id, ttl_ms, max_rows, admission] : tables) spec.tables.push_back({id, ttl_ms, max_rows, admission});
  spec.buckets = buckets;
  spec.partitions = partitions;
  spec.seed = seed;
  spec.serving = serving;
  spec.held = held;
  spec.consumed = {publish_rows, flush_rows};
  new (self) OwnedStore(std::move(spec));
}

Keys keys_of(const Store& store, const In<uint64_t>& keys, const In<uint8_t>& tables,
             const In<uint32_t>& bucket_starts) {
  expect(tables.size() == keys.size(), "tables must be as long as keys");
  expect(bucket_starts.size() == store.buckets() + 1, "bucket_starts must hold one more than the model's buckets");
  return {keys.data(), tables.data(), keys.size(), bucket_starts.data()};
}

int64_t lookup(Store& store, uint32_t group, In<uint64_t> keys, In<uint8_t> tables, In<uint32_t> bucket_starts,
               Out2<float> out, bool create, std::optional<Out<uint8_t>> found, std::optional<Out<uint32_t>> touched,
               std::optional<Out2<float>> states, std::optional<Out2<int64_t>> known_pushes) {
  const Keys batch = keys_of(store, keys, tables, bucket_starts);
  expect(group < store.groups(), "no such store group");
  expect(out.shape(0) == keys.size() && out.shape(1) == store.layout(group).width(),
         "out must be (keys, floats of a row)");
  expect(!found || found->size() == keys.size(), "found must be as long as keys");
  expect(!touched || touched->size() == keys.size(), "touched must be as long as keys");
  expect(!states || (states->shape(0) == keys.size() && states->shape(1) == store.layout(group).state_floats()),
         "states must be (keys, floats of a row's optimiser state)");
  expect(!known_pushes || (known_pushes->shape(0) == store.buckets() && known_pushes->shape(1) == store.partitions()),
         "known_pushes must be (buckets, partitions)");
  const nb::gil_scoped_release release;
  const auto missing = store.lookup(group, batch, out.data(), create, found ? found->data() : nullptr,
                                    touched ? touched->data() : nullptr, states ? states->data() : nullptr,
                                    known_pushes ? known_pushes->data() : nullptr);
  if (!missing) return kAnswered;
  return missing->unread ? kRowsUnread : static_cast<int64_t>(missing->bucket);
}

int push(Store& store, In2<int64_t> ranges, int64_t clock_ms, const std::vector<PushTuple>& groups,
         std::optional<In<uint8_t>> owned) {
  expect(!owned || owned->size() == store.buckets(), "owned must hold one for each bucket");
  expect(ranges.shape(1) == 3, "ranges must be (n, 3): partition, start, stop");
  std::vector<PushGroup> batch;
  for (const auto& [group, keys, tables, bucket_starts, gradients] : groups) {
    expect(group < store.groups(), "no such store group");
    expect(gradients.shape(0) == keys.size() && gradients.shape(1) == store.layout(group).width(),
           "gradients must be (keys, floats of a row)");
    batch.push_back({group, keys_of(store, keys, tables, bucket_starts), gradients.data()});
  }
  const nb::gil_scoped_release release;
  return static_cast<int>(store.push(ranges.data(), ranges.shape(0), clock_ms, batch, owned ? owned->data() : nullptr));
}

nb::tuple collect_flush(Store& store, const std::vector<uint32_t>& buckets, bool whole) {
  FlushBatch batch;
  {
    const nb::gil_scoped_release release;
    batch = store.collect_flush(buckets, whole);
  }
  const size_t n = batch.buckets.size();
  auto [directory, body] = arrays_of(std::move(batch.runs));
  return nb::make_tuple(array(std::vector<int64_t>(batch.buckets.begin(), batch.buckets.end())),
                        array(std::move(batch.applied), {n, store.partitions()}), array(std::move(batch.clock_ms)),
                        array(std::move(batch.rows)), directory, body);
}

// (buckets, tables, keys, fences).
nb::tuple unread(const Store& store,
                 const std::vector<std::tuple<uint32_t, In<uint64_t>, In<uint8_t>, In<uint32_t>>>& groups) {
  std::vector<std::pair<uint32_t, Keys>> batch;
  for (const auto& [group, keys, tables, bucket_starts] : groups)
    batch.emplace_back(group, keys_of(store, keys, tables, bucket_starts));
  Unread found;
  {
    const nb::gil_scoped_release release;
    found = store.unread(batch);
  }
  return nb::make_tuple(array(std::move(found.buckets)), array(std::move(found.tables)), array(std::move(found.keys)),
                        array(std::move(found.fences)));
}

void import_unread(Store& store, In<uint8_t> directory, In<uint8_t> body, uint64_t start, int64_t fence) {
  const RunsView runs = runs_view(directory, body, start);
  const nb::gil_scoped_release release;
  store.import_unread(runs, fence);
}

void settle(Store& store, In<int64_t> buckets, In<uint8_t> tables, In<uint64_t> keys, int64_t fence) {
  expect(buckets.size() == keys.size() && tables.size() == keys.size(), "a bucket and a table for each key");
  const nb::gil_scoped_release release;
  store.settle(buckets.data(), tables.data(), keys.data(), keys.size(), fence);
}

void begin_loading(Store& store, uint32_t bucket, In<int64_t> offsets, int64_t clock_ms, int64_t fence) {
  expect(offsets.size() == store.partitions(), "offsets must hold one for each partition");
  const nb::gil_scoped_release release;
  store.begin_loading(bucket, offsets.data(), clock_ms, fence);
}

void import_runs(Store& store, In<uint8_t> directory, In<uint8_t> body, uint64_t start) {
  const RunsView runs = runs_view(directory, body, start);
  const nb::gil_scoped_release release;
  store.import_runs(runs);
}

nb::list unpack_runs(const Store& store, In<uint8_t> directory, In<uint8_t> body, uint64_t start) {
  const RunsView runs = runs_view(directory, body, start);
  std::vector<UnpackedTable> unpacked;
  {
    const nb::gil_scoped_release release;
    unpacked = store.unpack_runs(runs);
  }
  nb::list tables;
  for (UnpackedTable& part : unpacked) {
    const size_t n = part.keys.size();
    tables.append(nb::make_tuple(part.table, array(std::move(part.keys)),
                                 array(std::move(part.values), {n, part.width}), array(std::move(part.touched))));
  }
  return tables;
}

nb::tuple published(Store& store, PublishBatch (Store::*collect)(int64_t), int64_t max_rows) {
  PublishBatch batch;
  {
    const nb::gil_scoped_release release;
    batch = (store.*collect)(max_rows);
  }
  nb::list tables;
  for (PublishedTable& part : batch.tables) {
    const size_t n = part.keys.size();
    tables.append(nb::make_tuple(part.table, array(std::move(part.keys)),
                                 array(std::move(part.values), {n, part.width}), array(std::move(part.removed))));
  }
  return nb::make_tuple(tables, batch.clock_ms, batch.pending, batch.passed);
}

nb::tuple collect_publish(Store& store, int64_t max_rows) {
  return published(store, &Store::collect_publish, max_rows);
}

nb::tuple collect_inexact(Store& store, int64_t max_rows) {
  return published(store, &Store::collect_inexact, max_rows);
}

void import_rows(Store& store, uint8_t table, In<uint64_t> keys, In2<uint8_t> records) {
  expect(records.shape(0) == keys.size(), "records must be as many as keys");
  const nb::gil_scoped_release release;
  store.import_rows(table, keys.data(), records.data(), keys.size(), records.shape(1));
}

nb::tuple export_rows(Store& store, uint8_t table, In<uint64_t> keys) {
  const size_t packed = store.layout(store.group_of(table)).packed_bytes();
  std::vector<uint8_t> records(keys.size() * packed), found(keys.size());
  {
    const nb::gil_scoped_release release;
    store.export_rows(table, keys.data(), keys.size(), records.data(), found.data());
  }
  return nb::make_tuple(array(std::move(found)), array(std::move(records), {keys.size(), packed}));
}

void import_values(Store& store, uint8_t table, In<uint64_t> keys, In2<float> values, int64_t clock_ms,
                   std::optional<In<uint32_t>> touched) {
  expect(values.shape(0) == keys.size() && values.shape(1) == store.layout(store.group_of(table)).width(),
         "values must be (keys, floats of a row)");
  expect(!touched || touched->size() == keys.size(), "touched must be as long as keys");
  const nb::gil_scoped_release release;
  store.import_values(table, keys.data(), values.data(), keys.size(), clock_ms, touched ? touched->data() : nullptr);
}

int64_t remove(Store& store, uint8_t table, In<uint64_t> keys) {
  const nb::gil_scoped_release release;
  return store.remove(table, keys.data(), keys.size());
}

void keep_cold(Store& store, const std::string& folder, size_t memory_bytes, size_t disk_bytes) {
  try {
    store.keep_cold({folder, memory_bytes, disk_bytes});
  } catch (const ColdFault& error) {
    throw nb::value_error(error.what());
  }
}

nb::object fetch(Store& store, uint32_t group, In<uint64_t> keys, In<uint8_t> tables, In<uint32_t> bucket_starts) {
  const Keys batch = keys_of(store, keys, tables, bucket_starts);
  std::vector<uint8_t> here(keys.size());
  {
    const nb::gil_scoped_release release;
    store.fetch(group, batch, here.data());
  }
  return array(std::move(here));
}

nb::dict cold_counts(const Store& store) {
  ColdCounts c;
  {
    const nb::gil_scoped_release release;
    c = store.cold_counts();
  }
  nb::dict out;
  out["rows"] = c.rows;
  out["fetched"] = c.fetched;
  out["spilled"] = c.spilled;
  out["pages_read"] = c.pages_read;
  out["pages_written"] = c.pages_written;
  out["waits"] = c.waits;
  out["bytes_in_use"] = c.bytes_in_use;
  out["bytes_on_disk"] = c.bytes_on_disk;
  out["full"] = c.full;
  return out;
}

void put_back_published(Store& store, uint8_t table, In<uint64_t> keys, In<uint64_t> removed) {
  const nb::gil_scoped_release release;
  store.put_back_published(table, keys.data(), keys.size(), removed.data(), removed.size());
}

nb::tuple evict(Store& store, int64_t now_ms, int64_t budget) {
  Evicted done;
  {
    const nb::gil_scoped_release release;
    done = store.evict(now_ms, budget);
  }
  return nb::make_tuple(done.examined, done.evicted, done.finished);
}

void set_applied(Store& store, uint32_t bucket, In<int64_t> offsets, int64_t clock_ms) {
  expect(offsets.size() == store.partitions(), "offsets must hold one for each partition");
  const nb::gil_scoped_release release;
  store.set_applied(bucket, offsets.data(), clock_ms);
}

nb::object applied_of(const Store& store, uint32_t bucket) {
  std::vector<int64_t> offsets(store.partitions());
  store.applied_of(bucket, offsets.data());
  return array(std::move(offsets));
}

nb::tuple counts(const Store& store) {
  const Counts c = store.counts();
  return nb::make_tuple(c.created, c.evicted, c.not_finite, c.not_admitted);
}

}  // namespace

void bind_store(nb::module_& m) {
  nb::exception<ColdFault>(m, "ColdFault", PyExc_OSError);
  nb::class_<Store>(m, "StoreCalls")
      .def("lookup", &lookup, nb::arg("group"), nb::arg("keys"), nb::arg("tables"), nb::arg("bucket_starts"),
           nb::arg("out").noconvert(), nb::arg("create"), nb::arg("found").noconvert().none(),
           nb::arg("touched").noconvert().none() = nb::none(), nb::arg("states").noconvert().none() = nb::none(),
           nb::arg("known_pushes").noconvert().none() = nb::none())
      .def("push", &push, nb::arg("ranges"), nb::arg("clock_ms"), nb::arg("groups"),
           nb::arg("owned").none() = nb::none())
      .def("set_applied", &set_applied, nb::arg("bucket"), nb::arg("offsets"), nb::arg("clock_ms"))
      .def("applied_of", &applied_of, nb::arg("bucket"))
      .def("clock_of", &Store::clock_of, nb::arg("bucket"))
      .def("applied", &Store::applied, nb::call_guard<nb::gil_scoped_release>())
      .def("held", nb::overload_cast<>(&Store::held, nb::const_), nb::call_guard<nb::gil_scoped_release>())
      .def("drop_bucket", &Store::drop_bucket, nb::arg("bucket"), nb::call_guard<nb::gil_scoped_release>())
      .def("keep_cold", &keep_cold, nb::arg("folder"), nb::arg("memory_bytes"), nb::arg("disk_bytes"))
      .def("fetch", &fetch, nb::arg("group"), nb::arg("keys"), nb::arg("tables"), nb::arg("bucket_starts"))
      .def("cold_counts", &cold_counts)
      .def("check_cold", [](const Store& store) { store.check_cold(); })
      .def("collect_flush", &collect_flush, nb::arg("buckets"), nb::arg("whole"))
      .def("collect_publish", &collect_publish, nb::arg("max_rows"))
      .def("collect_inexact", &collect_inexact, nb::arg("max_rows"))
      .def("inexact", &Store::inexact)
      .def("round_published", &Store::round_published, nb::arg("bits"), nb::arg("scalars"))
      .def("put_back_published", &put_back_published, nb::arg("table"), nb::arg("keys"), nb::arg("removed"))
      .def("begin_loading", &begin_loading, nb::arg("bucket"), nb::arg("offsets"), nb::arg("clock_ms"),
           nb::arg("fence"))
      .def("unread", &unread, nb::arg("groups"))
      .def("import_unread", &import_unread, nb::arg("directory"), nb::arg("body"), nb::arg("start"), nb::arg("fence"))
      .def("settle", &settle, nb::arg("buckets"), nb::arg("tables"), nb::arg("keys"), nb::arg("fence"))
      .def("finish_loading", &Store::finish_loading, nb::arg("bucket"), nb::arg("fence"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("import_runs", &import_runs, nb::arg("directory"), nb::arg("body"), nb::arg("start"))
      .def("unpack_runs", &unpack_runs, nb::arg("directory"), nb::arg("body"), nb::arg("start"))
      .def("drained", &Store::drained)
      .def("pending", &Store::pending, nb::arg("consumer"))
      .def("import_rows", &import_rows, nb::arg("table"), nb::arg("keys"), nb::arg("records"))
      .def("export_rows", &export_rows, nb::arg("table"), nb::arg("keys"))
      .def("import_values", &import_values, nb::arg("table"), nb::arg("keys"), nb::arg("values"), nb::arg("clock_ms"),
           nb::arg("touched").none() = nb::none())
      .def("remove", &remove, nb::arg("table"), nb::arg("keys"))
      .def("evict", &evict, nb::arg("now_ms"), nb::arg("budget"))
      .def("rows", &Store::rows, nb::arg("table"))
      .def("evicted", &Store::evicted, nb::arg("table"))
      .def("bytes", &Store::bytes)
      .def("counts", &counts)
      .def(
          "record_bytes", [](const Store& s, uint32_t g) { return s.row_bytes(g); }, nb::arg("group"))
      .def("packed_bytes", [](const Store& s, uint32_t g) { return s.layout(g).packed_bytes(); }, nb::arg("group"));
  nb::class_<OwnedStore, Store>(m, "Store")
      .def("__init__", &make, nb::arg("groups"), nb::arg("tables"), nb::arg("buckets"), nb::arg("partitions"),
           nb::arg("seed"), nb::arg("serving"), nb::arg("publish"), nb::arg("flush"), nb::arg("held"));
}

}  // namespace freshet
