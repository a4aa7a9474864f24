#include "freshet/feature_events.hpp"

#include <algorithm>
#include <charconv>
#include <stdexcept>
#include <string>

#include "freshet/avro_walk.hpp"
#include "freshet/event_time.hpp"

namespace freshet {
namespace {

constexpr size_t kFrame = 5;

// The most elements of an event: they are some hundred bytes each once extracted, however few they have in the event,
// and a repeated event may add each of them to the joiner's replay exclusions.
constexpr int64_t kMaxElements = 32'768;

void demand(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("event plan: ") + what);
}

struct Part {
  Hash128 hash;
  bool present = false;
};

// The identity of one event, or of one of its elements.
struct Envelope {
  std::vector<Part> parts;
  int64_t time = kNoTime;
  Part id;
  int64_t start = 0, end = 0;
};

struct EventHandler {
  static constexpr bool kExplodes = true;

  const EventPlan* plan;
  const Program* program;
  const uint8_t* data;  // spans count from here
  ExtractedEvents* out;

  Envelope event;
  std::vector<Envelope> elements;  // of this event; reused
  size_t count = 0;
  int64_t announced = 0;  // elements of the blocks so far
  bool inside = false;
  int64_t prefix_end = 0, suffix_start = 0;
  std::string request_text;
  struct Cell {
    double number = 0;
    uint64_t hash = 0;
    bool present = false;
  };
  std::vector<Cell> event_cells;    // (C,)
  std::vector<Cell> element_cells;  // (count, C)

  Envelope& here() { return inside ? elements[count - 1] : event; }
  Cell& cell(uint32_t c) { return inside ? element_cells[(count - 1) * event_cells.size() + c] : event_cells[c]; }

  static void reset(Envelope& e, size_t parts) {
    e.parts.assign(parts, Part{});
    e.time = kNoTime;
    e.id = Part{};
  }
  void begin_event() {
    reset(event, plan->part_in_element.size());
    event_cells.assign(plan->column_is_hash.size(), Cell{});
    element_cells.clear();
    request_text.clear();
    count = 0;
    announced = 0;
    inside = false;
  }

  bool takes_elements(int64_t n) { return (announced += n) <= kMaxElements; }
  void elements_begin(const uint8_t* p) { prefix_end = p - data; }
  void elements_end(const uint8_t* p) { suffix_start = p - data; }
  void element_begin(const uint8_t* p) {
    if (count == elements.size()) elements.emplace_back();
    reset(elements[count], plan->part_in_element.size());
    elements[count].start = p - data;
    element_cells.resize(element_cells.size() + event_cells.size());
    ++count;
    inside = true;
  }
  void element_end(const uint8_t* p) {
    here().end = p - data;
    inside = false;
  }

  void identity(const Sink& s, const Hash128& hash) {
    (static_cast<EventSink>(s.kind) == EventSink::kPart ? here().parts[s.slot] : here().id) = {hash, true};
  }

  bool is_request(const Sink& s) const { return static_cast<EventSink>(s.kind) == EventSink::kPart && s.slot == 0; }

  void on_int(const Sink& s, int64_t v) {
    switch (static_cast<EventSink>(s.kind)) {
      case EventSink::kPart:
      case EventSink::kId:
        identity(s, hash128_of_int(v));
        if (is_request(s)) {
          char digits[24];
          request_text.assign(digits, std::to_chars(digits, digits + sizeof digits, v).ptr);
        }
        break;
      case EventSink::kTime:
        here().time = time_of_int(static_cast<TimeUnit>(s.slot), v);
        break;
      case EventSink::kNumber:
        cell(s.slot) = {static_cast<double>(v), 0, true};
        break;
      case EventSink::kHash:
        cell(s.slot) = {0, key_of_int(v, 0), true};
        break;
      case EventSink::kInt:
        cell(s.slot) = {0, static_cast<uint64_t>(v), true};
    }
  }

  void on_double(const Sink& s, double v) {
    if (static_cast<EventSink>(s.kind) == EventSink::kNumber) {
      cell(s.slot) = {v, 0, v == v};
    } else if (static_cast<EventSink>(s.kind) == EventSink::kTime) {
      here().time = time_of_double(static_cast<TimeUnit>(s.slot), v);
    }
  }

  void on_bytes(const Sink& s, const uint8_t* p, size_t n) {
    switch (static_cast<EventSink>(s.kind)) {
      case EventSink::kPart:
      case EventSink::kId:
        identity(s, hash128_of_bytes(p, n));
        if (is_request(s)) request_text.assign(reinterpret_cast<const char*>(p), n);
        break;
      case EventSink::kTime:
        here().time = time_of_text({reinterpret_cast<const char*>(p), n});
        break;
      case EventSink::kHash:
        cell(s.slot) = {0, key_of_bytes(p, n, 0), true};
        break;
      case EventSink::kNumber:
      case EventSink::kInt:
        break;
    }
  }

  void on_enum(const Sink& s, uint32_t symbol) {
    if (symbol >= s.words_size) return;
    const uint64_t word = program->words()[s.words_begin + symbol];
    if (static_cast<EventSink>(s.kind) == EventSink::kHash) {
      cell(s.slot) = {0, word, true};
    } else if (word < program->texts()) {  // identities: the words number the symbols' strings
      const auto text = program->text(word);
      on_bytes(s, reinterpret_cast<const uint8_t*>(text.data()), text.size());
    }
  }

  // The event was read to its end: append its rows, or report the missing field.
  Why finish(int64_t index, int64_t start, int64_t end) {
    const size_t rows = plan->explode ? count : 1;
    const size_t first = out->impressions.size();
    Hash128 content{};
    if (!plan->has_id) content = hash128_of_bytes(data + start, static_cast<size_t>(end - start));
    std::vector<Hash128> key(plan->part_in_element.size());
    for (size_t m = 0; m < rows; ++m) {
      const Envelope& element = plan->explode ? elements[m] : event;
      const Why why = append(index, m, element, content, key);
      if (why != Why::kNone) {
        shrink(first);
        return why;
      }
      if (plan->explode) {
        out->spans.push_back({start, prefix_end, element.start, element.end, suffix_start, end});
      } else {
        out->spans.push_back({start, start, start, end, end, end});
      }
    }
    append_columns(rows);
    out->events.push_back(index);
    out->request_keys.append(reinterpret_cast<const uint8_t*>(request_text.data()), request_text.size());
    out->request_keys.close();
    return Why::kNone;
  }

  Why append(int64_t index, size_t m, const Envelope& element, const Hash128& content, std::vector<Hash128>& key) {
    for (size_t k = 0; k < key.size(); ++k) {
      const Part& part = (plan->part_in_element[k] ? element : event).parts[k];
      if (!part.present) return Why::kMissingKey;
      key[k] = part.hash;
    }
    const int64_t time = (plan->time_in_element ? element : event).time;
    if (const Why why = why_of_time(time); why != Why::kNone) return why;
    Hash128 id = content;
    if (plan->has_id) {
      const Part& part = (plan->id_in_element ? element : event).id;
      if (!part.present) return Why::kMissingId;
      id = part.hash;
    }
    if (plan->explode && !(plan->has_id && plan->id_in_element)) {
      const Hash128 both[2] = {id, hash128_of_int(static_cast<int64_t>(m))};
      id = hash128_of_parts(both, 2);
    }
    out->event_index.push_back(index);
    out->impressions.push_back(hash128_of_parts(key.data(), key.size()));
    out->requests.push_back(key[0].high);
    out->ids.push_back(id);
    out->times_ms.push_back(time);
    return Why::kNone;
  }

  void append_columns(size_t rows) {
    for (size_t c = 0; c < event_cells.size(); ++c) {
      EventColumn& column = out->columns[c];
      for (size_t m = 0; m < rows; ++m) {
        const Cell& v = plan->column_in_element[c] ? element_cells[m * event_cells.size() + c] : event_cells[c];
        if (plan->column_is_hash[c]) {
          column.hashes.push_back(v.hash);
        } else {
          column.numbers.push_back(v.number);
        }
        column.null.push_back(!v.present);
      }
    }
  }

  void shrink(size_t rows) {
    out->event_index.resize(rows);
    out->impressions.resize(rows);
    out->requests.resize(rows);
    out->ids.resize(rows);
    out->times_ms.resize(rows);
    out->spans.resize(rows);
  }
};

// What EventHandler::append demands of an event, without the values.
struct EventChecker {
  static constexpr bool kExplodes = true;

  struct Found {
    uint64_t parts = 0;  // bit k: part k of the key is there
    int64_t time = kNoTime;
    bool id = false;
  };

  const Program* program;
  Found wanted_of_event, wanted_of_element;  // times: kNoTime where none is wanted
  int64_t latest_ms;

  Found event, element;
  bool inside = false, all_elements_good = true;
  size_t count = 0;
  int64_t announced = 0;

  EventChecker(const EventPlan& plan, const Program& of, int64_t latest) : program(&of), latest_ms(latest) {
    for (size_t k = 0; k < plan.part_in_element.size(); ++k) {
      wanted_of(plan.explode && plan.part_in_element[k]).parts |= uint64_t{1} << k;
    }
    wanted_of(plan.explode && plan.time_in_element).time = 0;
    wanted_of(plan.explode && plan.id_in_element).id = plan.has_id;
  }

  Found& wanted_of(bool an_element) { return an_element ? wanted_of_element : wanted_of_event; }

  bool is_good(const Found& found, const Found& wanted) const {
    if ((found.parts & wanted.parts) != wanted.parts || (wanted.id && !found.id)) return false;
    return wanted.time == kNoTime || !is_implausible_time(found.time, latest_ms);
  }

  bool takes_elements(int64_t n) { return (announced += n) <= kMaxElements; }
  void elements_begin(const uint8_t*) {}
  void elements_end(const uint8_t*) {}
  void element_begin(const uint8_t*) {
    element = {};
    inside = true;
    ++count;
  }
  void element_end(const uint8_t*) {
    all_elements_good = all_elements_good && is_good(element, wanted_of_element);
    inside = false;
  }

  Found& here() { return inside ? element : event; }
  bool takes_time(const Sink& s) {
    switch (static_cast<EventSink>(s.kind)) {
      case EventSink::kPart:
        here().parts |= uint64_t{1} << s.slot;
        return false;
      case EventSink::kId:
        here().id = true;
        return false;
      default:
        return static_cast<EventSink>(s.kind) == EventSink::kTime;
    }
  }

  void on_int(const Sink& s, int64_t v) {
    if (takes_time(s)) here().time = time_of_int(static_cast<TimeUnit>(s.slot), v);
  }
  void on_double(const Sink& s, double v) {
    if (static_cast<EventSink>(s.kind) == EventSink::kTime)
      here().time = time_of_double(static_cast<TimeUnit>(s.slot), v);
  }
  void on_bytes(const Sink& s, const uint8_t* p, size_t n) {
    if (takes_time(s)) here().time = time_of_text({reinterpret_cast<const char*>(p), n});
  }
  void on_enum(const Sink& s, uint32_t symbol) {
    if (symbol >= s.words_size || static_cast<EventSink>(s.kind) == EventSink::kHash) return;
    const uint64_t word = program->words()[s.words_begin + symbol];
    if (word >= program->texts()) return;
    const auto text = program->text(word);
    on_bytes(s, reinterpret_cast<const uint8_t*>(text.data()), text.size());
  }
};

}  // namespace

bool is_readable_event(const EventPlan& plan, const Program& program, std::span<const uint8_t> record,
                       int64_t latest_ms) {
  if (plan.part_in_element.size() > 64) return false;
  EventChecker checker(plan, program, latest_ms);
  const uint8_t* const end = record.data() + record.size();
  if (!Walker<EventChecker>(program, checker, end).walk(record.data(), end)) return false;
  if (!plan.explode) return checker.is_good(checker.event, checker.wanted_of_event);
  return checker.count == 0 || (checker.all_elements_good && checker.is_good(checker.event, checker.wanted_of_event));
}

void EventPlan::check(const Program& program) const {
  demand(!part_in_element.empty() && !part_in_element[0], "the key's first part is the event's own");
  demand(column_is_hash.size() == column_in_element.size(), "columns have a kind and a place each");
  const bool explodes =
      std::any_of(program.nodes().begin(), program.nodes().end(), [](const Node& n) { return n.explode; });
  demand(explodes == explode, "one array is exploded, or none");
  for (const auto& s : program.sinks()) {
    switch (static_cast<EventSink>(s.kind)) {
      case EventSink::kPart:
        demand(s.slot < part_in_element.size(), "no such part of the key");
        break;
      case EventSink::kTime:
        demand(s.slot <= static_cast<uint32_t>(TimeUnit::kDays), "no such unit of time");
        break;
      case EventSink::kId:
        break;
      case EventSink::kNumber:
      case EventSink::kHash:
      case EventSink::kInt:
        demand(s.slot < column_is_hash.size(), "no such column");
        break;
      default:
        demand(false, "no such sink");
    }
  }
}

ExtractedEvents extract_events(const EventPlan& plan, const Program& program, std::span<const uint8_t> data,
                               std::span<const int64_t> ends, bool framed) {
  const BytesView view(data, ends);
  ExtractedEvents out;
  out.columns.resize(plan.column_is_hash.size());
  EventHandler h;
  h.plan = &plan;
  h.program = &program;
  h.data = data.data();
  h.out = &out;
  Walker<EventHandler> walker(program, h, data.data() + data.size());
  for (size_t i = 0; i < view.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    int64_t start = view.start(i);
    const int64_t end = view.end(i);
    if (framed) {
      if (end - start < static_cast<int64_t>(kFrame) || data[static_cast<size_t>(start)] != 0) {
        out.bad.push_back({index, {Why::kFrame, 0, 0}});
        continue;
      }
      start += kFrame;
    }
    h.begin_event();
    if (!walker.walk(data.data() + start, data.data() + end)) {
      out.bad.push_back({index, walker.failure()});
      continue;
    }
    // A nullable array that is null: the event has no elements, and its spans are never used.
    const Why why = h.finish(index, start, end);
    if (why != Why::kNone) out.bad.push_back({index, {why, 0, end - start}});
  }
  return out;
}

BytesColumn splice(std::span<const uint8_t> data, std::span<const int64_t> spans) {
  BytesColumn out;
  const auto size = static_cast<int64_t>(data.size());
  size_t total = 0;
  for (size_t i = 0; i + 1 < spans.size(); i += 2) {
    demand(spans[i] >= 0 && spans[i] <= spans[i + 1] && spans[i + 1] <= size, "a span is out of range");
    total += static_cast<size_t>(spans[i + 1] - spans[i]);
  }
  demand(spans.size() % 6 == 0, "spans come in rows of 6");
  out.data.reserve(total);
  for (size_t i = 0; i < spans.size(); i += 6) {
    for (size_t k = 0; k < 6; k += 2) {
      out.append(data.data() + spans[i + k], static_cast<size_t>(spans[i + k + 1] - spans[i + k]));
    }
    out.close();
  }
  return out;
}

}  // namespace freshet
