// Function multi-versions: the loop is compiled for several instruction sets and chosen at load.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define FRESHET_FEATURE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else  // sanitizers run before the choice is made; other compilers vectorise for the plain set
#define FRESHET_FEATURE_CLONES
#endif
