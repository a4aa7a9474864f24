"""The memory limit of a cgroup, in trees like those of /proc and /sys/fs/cgroup."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from freshet.process.memory import memory_limit

V2 = "0::/system.slice/freshet.service/inner\n"
V1 = "9:name=systemd:/\n4:cpu,memory:/slurm/job_7/step_0\n0::/elsewhere\n"
UNLIMITED = "9223372036854771712"


def limit(root: Path, groups: str | None, limits: Mapping[str, str]) -> int | None:
    """Return the limit of a process in `groups`, its /proc/self/cgroup, beside files of /sys/fs/cgroup."""
    if groups is not None:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return memory_limit(root)


LEAF, PARENT = "system.slice/freshet.service/inner/", "system.slice/freshet.service/"


@pytest.mark.parametrize(
    ("limits", "least"),
    [
        ({}, None),
        ({LEAF: "max", PARENT: "max", "": "max"}, None),
        ({LEAF: "1000"}, 1000),
        ({LEAF: "max", PARENT: "2000", "system.slice/": "max"}, 2000),
        ({LEAF: "3000", PARENT: "2000", "system.slice/": "4000"}, 2000),
        ({LEAF: "1000", PARENT: "2000"}, 1000),
        ({"": "5000"}, 5000),  # the path is that of the host, the tree that of a container
        ({"system.slice/other.service/": "10"}, None),
    ],
)
def test_the_least_limit_of_a_group_and_its_parents(
    tmp_path: Path, limits: Mapping[str, str], least: int | None
) -> None:
    assert limit(tmp_path, V2, {f"{name}memory.max": text for name, text in limits.items()}) == least


@pytest.mark.parametrize(
    ("limits", "least"),
    [
        ({"": UNLIMITED, "slurm/": UNLIMITED, "slurm/job_7/step_0/": UNLIMITED}, None),
        ({"": UNLIMITED, "slurm/job_7/": UNLIMITED, "slurm/job_7/step_0/": "1000"}, 1000),
        ({"": UNLIMITED, "slurm/job_7/": "2000", "slurm/job_7/step_0/": UNLIMITED}, 2000),
        ({"": "5000"}, 5000),
    ],
)
def test_the_least_limit_with_version_1_of_cgroups(
    tmp_path: Path, limits: Mapping[str, str], least: int | None
) -> None:
    files = {f"memory/{name}memory.limit_in_bytes": text for name, text in limits.items()}
    assert limit(tmp_path, V1, files) == least


@pytest.mark.parametrize("groups", ["0::/\n", "0::/../../other\n", "0::/gone (deleted)\n", "", None])
def test_a_group_that_is_the_root_or_unknown(tmp_path: Path, groups: str | None) -> None:
    assert limit(tmp_path, groups, {"memory.max": "1000"}) == 1000


def test_a_group_name_may_hold_a_colon(tmp_path: Path) -> None:
    assert limit(tmp_path, "0::/a:b\n", {"a:b/memory.max": "1000"}) == 1000
