// A fuzzing driver for compilers without libFuzzer: mutates corpus inputs, deterministically from a seed.
//
// Usage, as libFuzzer's: fuzz_avro [-runs=N] [-seed=N] [-max_len=BYTES] [CORPUS FILE...]   ("--runs N" does too)
// Without files it starts from the target's own seeds, if it has any, and from nothing.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

using Input = std::vector<uint8_t>;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// A target may name inputs to start from; the weak default has none.
std::vector<Input> fuzz_seeds();
__attribute__((weak)) std::vector<Input> fuzz_seeds() { return {}; }

namespace {

struct Options {
  uint64_t runs = 100'000;
  uint64_t seed = 1;
  size_t max_size = 4096;
  std::vector<Input> corpus;
};

[[noreturn]] void usage(const std::string& problem) {
  std::fprintf(stderr, "%s\nusage: [-runs=N] [-seed=N] [-max_len=BYTES] [FILE...]\n", problem.c_str());
  std::exit(2);
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    std::string arg = argv[i];
    if (arg[0] != '-') {
      std::ifstream file(arg, std::ios::binary);
      if (!file) usage(arg + " cannot be read");
      o.corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
      continue;
    }
    arg.erase(0, arg.find_first_not_of('-'));
    const size_t equals = arg.find('=');
    if (equals == std::string::npos && i + 1 >= argc) usage("a number must follow " + arg);
    const std::string value = equals == std::string::npos ? argv[++i] : arg.substr(equals + 1);
    const std::string name = arg.substr(0, equals);
    const uint64_t number = std::strtoull(value.c_str(), nullptr, 10);
    if (name == "runs") {
      o.runs = number;
    } else if (name == "seed") {
      o.seed = number;
    } else if (name == "max_len" || name == "max-size") {
      o.max_size = number;
    } else {
      usage("no such option: " + name);
    }
  }
  return o;
}

class Mutator {
 public:
  Mutator(uint64_t seed, size_t max_size) : random_(seed), max_size_(max_size) {}

  size_t below(size_t n) { return n ? static_cast<size_t>(random_() % n) : 0; }

  void mutate(Input& in, const Input& other) {
    static constexpr uint8_t kNasty[] = {0x00, 0x01, 0x02, 0x7F, 0x80, 0x81, 0xFE, 0xFF,
                                         '"',  '\\', '{',  '[',  '}',  ']',  ',',  '0'};
    for (size_t step = 1 + below(4); step-- > 0;) {
      const size_t at = below(in.size() + 1);
      const auto here = in.begin() + static_cast<ptrdiff_t>(at);
      switch (below(7)) {
        case 0:
          if (at < in.size()) in[at] ^= static_cast<uint8_t>(1u << below(8));
          break;
        case 1:
          if (at < in.size()) in[at] = kNasty[below(sizeof kNasty)];
          break;
        case 2:
          in.insert(here, kNasty[below(sizeof kNasty)]);
          break;
        case 3:
          in.erase(here, here + static_cast<ptrdiff_t>(below(std::min<size_t>(8, in.size() - at) + 1)));
          break;
        case 4:
          in.resize(at);
          break;
        case 5: {  // a piece of another input
          const size_t from = below(other.size() + 1), n = below(other.size() - from + 1);
          const Input piece(other.begin() + static_cast<ptrdiff_t>(from),
                            other.begin() + static_cast<ptrdiff_t>(from + n));
          in.insert(here, piece.begin(), piece.end());
          break;
        }
        default:  // a long run of one byte: deep nesting, overlong numbers
          in.insert(here, below(200), kNasty[below(sizeof kNasty)]);
      }
      if (in.size() > max_size_) in.resize(max_size_);
    }
  }

 private:
  std::mt19937_64 random_;
  size_t max_size_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options = parse(argc, argv);
  for (auto& seed : fuzz_seeds()) options.corpus.push_back(std::move(seed));
  options.corpus.emplace_back();
  for (const auto& input : options.corpus) LLVMFuzzerTestOneInput(input.data(), input.size());
  Mutator mutator(options.seed, options.max_size);
  std::vector<Input> pool = options.corpus;
  for (uint64_t run = 0; run < options.runs; ++run) {
    Input input = pool[mutator.below(pool.size())];
    mutator.mutate(input, pool[mutator.below(pool.size())]);
    LLVMFuzzerTestOneInput(input.data(), input.size());
    // Without coverage a random walk: some mutants are kept, so that faults can add up.
    if (mutator.below(64) == 0) {
      if (pool.size() < 1024) {
        pool.push_back(std::move(input));
      } else {
        pool[options.corpus.size() + mutator.below(pool.size() - options.corpus.size())] = std::move(input);
      }
    }
  }
  std::printf("%llu runs from %zu inputs, seed %llu: no fault\n", static_cast<unsigned long long>(options.runs),
              options.corpus.size(), static_cast<unsigned long long>(options.seed));
  return 0;
}
