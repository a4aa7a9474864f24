// The build of the core, and the processor that it runs on.
#pragma once

namespace freshet {

// Name of the instruction set that function multi-versioning picks on this processor.
const char* instruction_set();

}  // namespace freshet
