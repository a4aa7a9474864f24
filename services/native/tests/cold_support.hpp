// Stores with rows on disk.
#pragma once

#include <filesystem>
#include <string>
#include <thread>

#include "table_support.hpp"

namespace freshet::testing {

// On the disk of the checkout: a temporary folder may be in memory, which has no O_DIRECT.
inline std::string folder() { return std::filesystem::current_path().string(); }

inline ColdSpec tight(size_t memory_bytes = 300'000) { return {folder(), memory_bytes, 0}; }

inline void wait_until_spilled(const Store& store, int64_t rows) {
  while (store.cold_counts().rows < rows) std::this_thread::yield();
}

}  // namespace freshet::testing
