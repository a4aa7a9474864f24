"""Settings of glibc's allocator, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

GROWTH = """
import sys
import numpy as np
from freshet.process.memory import return_large_blocks

if sys.argv[1] == "fixed":
    assert return_large_blocks()
np.ones(1 << 21)  # 16 MiB, freed at once: raises the mmap threshold, unless it is fixed
kept = []
large = []
for _ in range(40):
    large.append(np.ones(1 << 18))  # 2 MiB
    kept.append(bytearray(100_000))  # pins the heap above the freed blocks
del large
pages = int(open("/proc/self/statm").read().split()[1])
print(pages * 4096 >> 20)
"""


def resident_mb(mode: str) -> int:
    """Measure resident memory, MB, after 80 MiB of large arrays were freed between small ones."""
    done = subprocess.run([sys.executable, "-c", GROWTH, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_large_arrays_return_to_system() -> None:
    default, fixed = resident_mb("default"), resident_mb("fixed")

    assert default - fixed > 40, "the allocator no longer grows: remove the setting"


FAULTS = """
import resource, sys
import numpy as np
from freshet.process.memory import keep_large_blocks

if sys.argv[1] == "kept":
    assert keep_large_blocks()
first = np.ones(1 << 20), np.ones(1 << 20)  # 8 MiB each
del first
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    both = np.ones(1 << 20), np.ones(1 << 20)
    del both
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults")
def test_kept_memory_causes_no_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS, "kept"], capture_output=True, text=True, check=True)

    assert int(done.stdout) < 100
