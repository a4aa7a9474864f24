"""Large blocks are given back to the system, whatever was freed before, or kept, as a process asks."""

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
np.ones(1 << 21)  # 16 MiB, freed at once: without a fixed limit, blocks up to this size come from the heap
kept = []
large = []
for _ in range(40):
    large.append(np.ones(1 << 18))  # 2 MiB
    kept.append(bytearray(100_000))  # stays, and pins the heap above what was freed below
del large
pages = int(open("/proc/self/statm").read().split()[1])
print(pages * 4096 >> 20)
"""


def resident_mb(mode: str) -> int:
    """Resident memory after 80 MiB of large arrays came and went between small ones that stay."""
    done = subprocess.run([sys.executable, "-c", GROWTH, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_arrays_between_small_ones_leave_nothing_behind() -> None:
    as_it_comes, fixed = resident_mb("as it comes"), resident_mb("fixed")

    assert as_it_comes - fixed > 40, "what this guards against is no longer there: drop the module"


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
def test_large_arrays_that_are_kept_cost_no_page_faults_again() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS, "kept"], capture_output=True, text=True, check=True)

    assert int(done.stdout) < 100
