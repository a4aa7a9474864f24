// Runs a fuzz target where libFuzzer is not at hand: mutates the inputs in a folder, or inputs of its own, and says how to
// repeat a failure. `fuzz_x [seconds] [seed] [folder of inputs]`.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes mutated(Bytes input, const Bytes& other, std::mt19937_64& random) {
  static const std::uint8_t interesting[] = {0x00, 0x01, 0x02, 0x7f, 0x80, 0x81, 0xfe, 0xff};
  for (std::uint64_t turn = 0, turns = 1 + random() % 6; turn < turns; turn++) {
    const std::size_t at = input.empty() ? 0 : random() % input.size();
    switch (random() % 7) {
      case 0: if (!input.empty()) input[at] ^= static_cast<std::uint8_t>(1u << (random() % 8)); break;
      case 1: if (!input.empty()) input[at] = interesting[random() % sizeof interesting]; break;
      case 2: if (!input.empty()) input[at] = static_cast<std::uint8_t>(random()); break;
      case 3: input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), 1 + random() % 16, static_cast<std::uint8_t>(random())); break;
      case 4: input.resize(at); break;
      case 5: if (!other.empty()) input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(random() % other.size()), other.end()); break;
      case 6: for (std::uint64_t i = 0, n = random() % 200; i < n; i++) input.push_back(random() % 4 ? 0 : static_cast<std::uint8_t>(random())); break;
    }
  }
  if (input.size() > 4096) input.resize(4096);
  return input;
}

}  // namespace

int main(int count, char** arguments) {
  const double limit = count > 1 ? std::atof(arguments[1]) : 10.0;
  const std::uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : std::random_device{}();
  std::vector<Bytes> corpus(1);
  if (count > 3)
    for (const auto& entry : std::filesystem::directory_iterator(arguments[3])) {
      std::ifstream file(entry.path(), std::ios::binary);
      corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
  std::printf("seed %llu, %zu inputs\n", static_cast<unsigned long long>(seed), corpus.size());
  std::fflush(stdout);
  for (const Bytes& input : corpus) LLVMFuzzerTestOneInput(input.data(), input.size());
  std::mt19937_64 random(seed);
  std::uint64_t runs = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit);
  while (std::chrono::steady_clock::now() < end) {
    const Bytes input = mutated(corpus[random() % corpus.size()], corpus[random() % corpus.size()], random);
    LLVMFuzzerTestOneInput(input.data(), input.size());
    // Without coverage to go by, some mutants are kept so that changes add up.
    if (++runs % 64 == 0 && corpus.size() < 1024) corpus.push_back(input);
  }
  std::printf("%llu runs\n", static_cast<unsigned long long>(runs));
  return 0;
}
