// How the core was built and what it runs on.
#pragma once

namespace freshet {

// Name of the instruction set that function multi-versioning picks on this processor.
const char* instruction_set();

}  // namespace freshet
