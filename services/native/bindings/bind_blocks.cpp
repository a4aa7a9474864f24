// Blocks of samples.
#include <nanobind/stl/string.h>

#include "arrays.hpp"
#include "freshet/block.hpp"

namespace freshet {
namespace {

nb::tuple read(const In<uint8_t>& data, const In<int64_t>& ends) {
  BlockColumns made;
  std::string why;
  size_t failed = 0;
  {
    nb::gil_scoped_release release;
    why = read_blocks(view(data), view(ends), made, failed);
  }
  if (!why.empty()) return nb::make_tuple(failed, why);
  return nb::make_tuple(
      to_numpy(std::move(made.counts)), to_numpy(std::move(made.schema_ids)), to_numpy(std::move(made.sample_ids)),
      to_numpy(std::move(made.times_ms)), to_numpy(std::move(made.requests)), to_numpy(std::move(made.values)),
      to_numpy(std::move(made.weights)), to_numpy(std::move(made.labels)), to_numpy(std::move(made.payloads)));
}

nb::tuple encode(uint32_t schema_id, const In<int64_t>& sample_ids, const In<int64_t>& times,
                 const In<uint64_t>& requests, const In<float>& values, const In<float>& weights,
                 const In<uint8_t>& labels, const In<uint8_t>& data, const In<int64_t>& ends,
                 const In<int64_t>& block_ends) {
  BytesColumn made;
  {
    nb::gil_scoped_release release;
    const BlockInput samples{view(sample_ids), view(times), view(requests), view(values), view(weights), view(labels)};
    encode_blocks(schema_id, samples, BytesView(view(data), view(ends)), view(block_ends), made);
  }
  return to_numpy(std::move(made));
}

}  // namespace

void bind_blocks(nb::module_& m) {
  m.def("read_blocks", &read);
  m.def("encode_blocks", &encode);
  m.def("block_crc32",
        [](nb::bytes data) { return block_crc32(static_cast<const uint8_t*>(data.data()), data.size()); });
  m.def("crc32", [](const In<uint8_t>& data, uint32_t crc) {
    const nb::gil_scoped_release release;
    return block_crc32(data.data(), data.size(), crc);
  });
}

}  // namespace freshet
