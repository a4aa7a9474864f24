"""The audit trail: actions done and failed, bounded refusals, reported damage."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import BadInput, FreshetError, Unavailable
from freshet.observability import audit as audit_module
from freshet.observability.audit import Actor, Audit, AuditLine, os_user, read_audit
from freshet.testing.clock import SettableClock

ADA = Actor("token:ada", "192.0.2.7")


def lines(path: Path) -> list[AuditLine]:
    told = read_audit(path, 1000)
    assert (told.damaged, told.unread_bytes) == (0, 0)
    return told.lines


def test_an_action_is_one_line_of_the_audit(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    what: dict[str, object] = {}
    with Audit(path, SettableClock(1_700_000_000_123)).of("promote", ADA, what):
        what["version"] = 12

    assert lines(path) == [
        AuditLine(
            "2023-11-14T22:13:20.123Z", "promote", "token:ada", "192.0.2.7", {"version": 12}, "done", ""
        )
    ]
    assert path.stat().st_mode & 0o777 == 0o600
    begun, done = (orjson.loads(line) for line in path.read_bytes().splitlines())
    assert (begun["outcome"], done["outcome"], begun["id"]) == ("begun", "done", done["id"])


@pytest.mark.parametrize(
    "error", [BadInput("no such version\nmore"), KeyboardInterrupt(), OSError(28, "full")]
)
def test_a_failed_action_is_a_line_with_the_reason(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "audit.jsonl"
    with pytest.raises(type(error)), Audit(path).of("promote", ADA, {"version": 1}):
        raise error

    (line,) = lines(path)
    assert (line.outcome, line.what) == ("failed", {"version": 1})
    assert line.why in ("no such version", "KeyboardInterrupt", "[Errno 28] full")


def test_a_line_is_on_disk_before_the_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "audit.jsonl", list[int]()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    with Audit(path).of("promote", ADA, {}):
        assert synced == [path.stat().st_size] != [0]

    assert synced[1:] == [path.stat().st_size]


@pytest.mark.parametrize("path", ["/nowhere/audit.jsonl", "/dev/full"])
def test_nothing_is_done_that_cannot_be_recorded(path: str) -> None:
    done = []
    with (
        pytest.raises(Unavailable, match=r"nothing was done.*FRESHET_COMMON_AUDIT_FILE"),
        Audit(Path(path)).of("promote", ADA, {}),
    ):
        done.append(1)

    assert done == []


def test_no_action_begins_unless_its_line_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    done = []
    with pytest.raises(Unavailable), Audit(tmp_path / "audit.jsonl").of("promote", ADA, {}):
        done.append(1)

    assert done == []


def test_an_action_without_an_outcome_is_not_known_to_be_done(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with Audit(path).of("promote", ADA, {"version": 1}):
        (under_way,) = lines(path)
        with Audit(path).of("rollback", ADA, {"version": 0}):  # another process is not waited for
            pass
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:-1]))  # killed before the promote's outcome

    begun, done = lines(path)
    assert begun == under_way
    assert (begun.action, begun.outcome, begun.what) == ("promote", "begun", {"version": 1})
    assert "not known" in begun.why
    assert (done.action, done.outcome) == ("rollback", "done")


def test_all_refusals_of_a_burst_are_counted_in_few_lines(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(path)
    for _ in range(1000):
        audit.on_refused("operate", "", "192.0.2.9", "token_unknown")
    audit.on_refused("operate", "shop", "192.0.2.9", "token_scope")
    audit.close()

    found = lines(path)
    assert len(found) <= 10
    assert sum(1 + line.what.get("also_refused", 0) for line in found) == 1001
    (last,) = (line for line in found if line.why == "token_scope")
    assert (last.outcome, last.who, last.at, last.why) == (
        "refused", "token:shop", "192.0.2.9", "token_scope"
    )  # fmt: skip


def test_a_truncated_line_does_not_damage_the_next(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"v":1,"time":"2023')
    with Audit(path).of("promote", ADA, {}):
        pass

    told = read_audit(path, 10)
    assert ([line.action for line in told.lines], told.damaged) == (["promote"], 1)


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(content + b"\n" + orjson.dumps({"time": 1}) + b"\n[]\n")

    told = read_audit(path, 10)
    assert told.lines == []
    assert told.damaged >= 2


def test_only_the_newest_are_read(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for number in range(5):
        with Audit(path).of("promote", ADA, {"version": number}):
            pass

    told = read_audit(path, 2)
    assert [line.what["version"] for line in told.lines] == [3, 4]
    assert told.unread_bytes > 0, "that there is more is told"


def test_a_rollback_is_found_behind_any_number_of_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "READ_BYTES", 1_000)
    path = tmp_path / "audit.jsonl"
    with Audit(path).of("rollback", ADA, {"version": 3}):
        pass
    refused = Audit(path)
    refused.on_refused("operate", "", "192.0.2.9", "token_unknown")
    refused.close()
    line = path.read_bytes().splitlines(keepends=True)[-1]
    with path.open("ab") as file:
        file.write(line * 2_000)

    assert {one.outcome for one in read_audit(path, 50).lines} == {"refused"}
    assert read_audit(path, 50).unread_bytes > 0
    (found,) = read_audit(path, 50, ("done", "failed", "begun")).lines
    assert (found.action, found.outcome, found.what) == ("rollback", "done", {"version": 3})


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 30), st.booleans())
def test_lines_do_not_depend_on_the_size_of_reads(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], size: int, ended: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines"
    content = b"\n".join(bytes([97 + i]) * n for i, n in enumerate(lengths)) + (b"\n" if ended else b"")
    path.write_bytes(content)

    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(audit_module, "READ_BYTES", size)
        read = list(audit_module.lines_backwards(file))

    assert [line for _, line in read][::-1] == content.splitlines()
    assert all(content[at : at + len(line)] == line for at, line in read)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FreshetError, match=r"audit\.jsonl"):
        read_audit(tmp_path / "audit.jsonl", 1)


def test_the_user_is_that_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("USER", "LOGNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody")

    assert os_user().who != "user:somebody"
    assert os_user().at == os.uname().nodename
