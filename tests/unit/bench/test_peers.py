"""The comparison's peers: their packages, and jobs that need no other code."""

import ast
import re
from pathlib import Path

import pytest

from bench import peers
from bench.peers import setup
from bench.peers.registry import PEERS
from bench.peers.running import TRAINING_KEYS, JobError, checked, environment_of

FILES = sorted(Path(peers.__file__).parent.glob("*.py"))
PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[a-z0-9,]+\])?==[0-9][A-Za-z0-9.]*")


@pytest.mark.parametrize("name", PEERS)
def test_every_package_of_a_peer_is_pinned_and_named_once(name):
    packages = [*PEERS[name].requirements, *PEERS[name].bare]

    assert packages
    assert [package for package in packages if not PINNED.fullmatch(package)] == []
    names = [package.split("==")[0].lower().replace("_", "-") for package in packages]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", PEERS)
def test_a_base_is_a_peer_without_a_base_of_its_own(name):
    base = PEERS[name].base

    assert base is None or PEERS[base].base is None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_jobs_import_nothing_of_freshet(file):
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            imported.add(node.module or "")
    ours = {name for name in imported if name.split(".")[0] in {"bench", "freshet", "tests"}}

    assert {name for name in ours if not name.startswith("bench.peers")} == set()


@pytest.mark.parametrize(
    "stamp", [None, '{"asked": ["torch==1.0"], "sees": []}'], ids=["incomplete", "older pins"]
)
def test_an_incomplete_or_outdated_environment_is_missing(tmp_path, stamp):
    (tmp_path / "torch").mkdir()
    if stamp:
        (tmp_path / "torch" / setup.STAMP).write_text(stamp)

    assert setup.missing("torch", tmp_path)


def test_every_job_of_a_peer_is_a_file():
    jobs = [job for name, peer in PEERS.items() for job in (name, *peer.also)]

    assert [job for job in jobs if not (Path(peers.__file__).parent / f"{job}_job.py").exists()] == []


def test_a_job_runs_in_the_environment_of_its_peer():
    assert environment_of("torch") == "torch"
    assert environment_of("fbgemm") == "torchrec"


def test_an_unknown_job_is_refused_with_the_names_of_all_jobs():
    with pytest.raises(JobError, match="no job 'tourch'; there are torch, torchrec, fbgemm"):
        environment_of("tourch")


def test_a_jobs_line_is_its_numbers():
    line = '{"samples_per_s": 5e4, "samples_per_cpu_s": 3e4, "logloss": 0.5, "batches": 9, "threads": 2}'

    assert checked(line, TRAINING_KEYS, "torch")["samples_per_s"] == 5e4


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"logloss": 0.5}', "torch: expected a number under 'samples_per_s', found nothing, only logloss"),
        ('{"samples_per_s": "many"}', "torch: expected a number under 'samples_per_s', found 'many'"),
        ('{"samples_per_s": true}', "found True"),
        ("[1]", r"torch printed '\[1\]': expected one JSON object"),
        ("Warming up...", "torch printed 'Warming up...': expected one JSON object"),
    ],
)
def test_a_malformed_line_of_a_job_is_refused(line, complaint):
    with pytest.raises(JobError, match=complaint):
        checked(line, ["samples_per_s"], "torch")
