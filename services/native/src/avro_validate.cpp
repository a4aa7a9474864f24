#include "freshet/avro_validate.hpp"

#include "freshet/avro_walk.hpp"
#include "freshet/bytes_column.hpp"

namespace freshet {
namespace {

struct NoHandler {
  static constexpr bool kExplodes = false;
  void on_int(const Sink&, int64_t) {}
  void on_double(const Sink&, double) {}
  void on_bytes(const Sink&, const uint8_t*, size_t) {}
  void on_enum(const Sink&, uint32_t) {}
};

}  // namespace

std::vector<std::pair<int64_t, Failure>> validate_avro(const Program& program, std::span<const uint8_t> data,
                                                       std::span<const int64_t> ends, bool framed) {
  const BytesView view(data, ends);
  NoHandler handler;
  Walker<NoHandler, true> walker(program, handler, data.data() + data.size());
  std::vector<std::pair<int64_t, Failure>> bad;
  for (size_t i = 0; i < view.size(); ++i) {
    const auto record = view[i];
    const size_t skip = framed ? 5 : 0;
    if (framed && (record.size() < skip || record[0] != 0)) {
      bad.emplace_back(static_cast<int64_t>(i), Failure{Why::kFrame, 0, 0});
    } else if (!walker.walk(record.data() + skip, record.data() + record.size())) {
      bad.emplace_back(static_cast<int64_t>(i), walker.failure());
    }
  }
  return bad;
}

}  // namespace freshet
