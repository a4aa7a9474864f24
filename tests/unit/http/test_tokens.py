"""Files of tokens, entries of given tokens, and decisions of the authenticator."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from freshet.errors import ConfigError
from freshet.http.authenticator import Authenticator
from freshet.http.messages import HttpError
from freshet.http.token_files import TokenFile, edit_tokens, read_token
from freshet.http.tokens import (
    MAX_TOKENS,
    SCOPES,
    Scope,
    TokenEntry,
    bearer,
    digest_of,
    line_of,
    matching_entry,
    new_token,
    parse_tokens,
)
from freshet.testing.clock import SettableClock

HASH = "sha256:" + "ab" * 32
NOW_MS = 1_700_000_000_000


def entry(name: str = "shop", token: str = "one", *scopes: Scope, **more: Any) -> TokenEntry:
    return TokenEntry(name, frozenset(scopes or ("send",)), digest_of(token.encode()), **more)


ENTRIES = st.builds(
    TokenEntry,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}", fullmatch=True),
    st.frozensets(st.sampled_from(SCOPES), min_size=1),
    st.binary(min_size=32, max_size=32),
    st.none() | st.integers(0, 4_000_000_000).map(lambda s: s * 1000),
    st.none() | st.integers(0, 10**9).map(lambda n: n / 1000),
    st.none() | st.integers(0, 10**9).map(lambda n: n / 1000),
)


@given(st.lists(ENTRIES, max_size=5, unique_by=lambda e: e.digest))
def test_written_text_is_parsed_again(entries: list[TokenEntry]) -> None:
    text = "# ours\n\n" + "".join(f"  {line_of(e)}\n" for e in entries)

    assert parse_tokens(text, "tokens") == tuple(entries)


@given(st.text(max_size=300))
def test_any_text_is_tokens_or_a_line_that_is_named(text: str) -> None:
    wrong = None
    try:
        parse_tokens(text, "tokens")
    except ConfigError as error:
        wrong = error.where
    assert wrong is None or wrong.startswith("tokens:")


@given(
    st.lists(
        st.sampled_from(
            ["shop", "send", "send,rank", HASH, HASH.upper(), "expires=2027-02-20T00:00:00Z", "x=1", "#", ","]
        ),
        max_size=6,
    )
)  # fmt: skip
def test_words_in_any_order_are_one_token_none_or_refused(words: list[str]) -> None:
    try:
        found = parse_tokens(" ".join(words), "tokens")
    except ConfigError:
        return
    assert len(found) == (1 if words and not words[0].startswith("#") else 0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("shop", "NAME SCOPES"),
        (f"-shop send {HASH}", "letter or digit"),
        (f"shop sell {HASH}", "send, rank, operate"),
        (f"shop send,,rank {HASH}", "send, rank, operate"),
        (f"shop send,send {HASH}", "send, rank, operate"),
        ("shop send freshet_secret", "64 hexadecimal digits"),
        (f"shop send {HASH}0", "64 hexadecimal digits"),
        (f"shop send {HASH} expires=tomorrow", "2027-02-20T00:00:00Z"),
        (f"shop send {HASH} expires=2027-02-20T00:00:00Z expires=2027-02-20T00:00:00Z", "once"),
        (f"shop send {HASH} requests_per_s=-1", "from 0"),
        (f"shop send {HASH} limit=3", "expires=…"),
        (f"shop send {HASH}\nweb rank {HASH}", "not in line 1"),
    ],
)
def test_a_wrong_line_is_refused_with_the_expected_form(line: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=r"tokens:[12]") as caught:
        parse_tokens(line, "tokens")

    assert expected in str(caught.value)
    assert "freshet_secret" not in str(caught.value)  # it may be the token itself


def test_too_many_tokens_are_refused() -> None:
    lines = [line_of(entry(token=str(i))) for i in range(MAX_TOKENS + 1)]

    assert len(parse_tokens("\n".join(lines[:-1]), "tokens")) == MAX_TOKENS
    with pytest.raises(ConfigError, match="at most"):
        parse_tokens("\n".join(lines), "tokens")


def test_new_tokens_differ_and_are_shown_as_they_are() -> None:
    one, other = new_token(), new_token()
    known = entry(token=one)

    assert one != other
    assert matching_entry(one.encode(), [entry(token="x"), known, entry(token="y")]) is known
    assert matching_entry(other.encode(), [known]) is None


@given(st.binary(max_size=2000), st.lists(ENTRIES, max_size=3))
def test_random_headers_match_no_token(header: bytes, entries: list[TokenEntry]) -> None:
    assert matching_entry(bearer(header), entries) is None
    assert matching_entry(bearer(b"Bearer " + header), entries) is None


@given(st.binary(max_size=50))
def test_a_bearer_is_read_in_any_case_and_spacing(token: bytes) -> None:
    assert bearer(b"bEARER   " + token + b" ") == token.strip()
    assert bearer(b"Basic " + token) == b""


# --- the file


def write(path: Path, *entries: TokenEntry, more: str = "") -> None:
    path.write_text("".join(f"{line_of(e)}\n" for e in entries) + more)


def names(file: TokenFile) -> list[str]:
    return [e.name for e in file.now()]


def test_a_change_is_taken_up_at_the_next_look_and_not_before(tmp_path: Path) -> None:
    clock, path = SettableClock(), tmp_path / "tokens"
    write(path, entry("a"))
    file = TokenFile(str(path), clock)
    write(path, entry("a"), entry("b", "two"))

    assert names(file) == ["a"]
    clock.advance(1)
    assert names(file) == ["a", "b"]


def test_a_replaced_file_and_a_turned_link_are_read_again(tmp_path: Path) -> None:
    """As Kubernetes does it: the file is a link through a folder that is a link, which is replaced."""
    clock = SettableClock()
    for folder, name in (("..1", "a"), ("..2", "b")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "tokens", entry(name))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "tokens").symlink_to("..data/tokens")
    file = TokenFile(str(tmp_path / "tokens"), clock)
    (tmp_path / "..new").symlink_to("..2")
    os.replace(tmp_path / "..new", tmp_path / "..data")
    clock.advance(1)

    assert names(file) == ["b"]


@pytest.mark.parametrize("how", ["gone", "wrong", "a folder", "binary", "huge"])
def test_a_wrong_file_leaves_the_former_tokens_valid(tmp_path: Path, how: str) -> None:
    clock, path = SettableClock(), tmp_path / "tokens"
    write(path, entry("a"))
    file = TokenFile(str(path), clock)
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how != "gone":
        path.write_bytes({"wrong": b"shop\n", "binary": b"\xff\x00", "huge": b"#" * (2 << 20)}[how])
    clock.advance(1)

    assert (names(file), file.wrong) == (["a"], True)
    if how == "a folder":
        path.rmdir()
    write(path, entry("b"))
    clock.advance(1)
    assert (names(file), file.wrong) == (["b"], False)


def test_a_failed_read_of_an_unchanged_file_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "tokens", SettableClock()
    path.write_text(line_of(entry("a")) + "\n")
    file = TokenFile(str(path), clock)
    path.write_text(line_of(entry("longer")) + "\n")  # a change within one tick shows by its length

    def too_many_files(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", too_many_files)
        clock.advance(1.1)
        assert (names(file), file.wrong) == (["a"], True)
    clock.advance(1.1)

    assert (names(file), file.wrong) == (["longer"], False)


def test_a_file_that_is_bad_from_the_start_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FRESHET_COMMON_TOKENS_FILE"):
        TokenFile(str(tmp_path / "tokens"))


@pytest.mark.parametrize("content", ["", "\n", "two words\n", "two\nlines\n", "\x07\n"])
def test_a_clients_file_must_hold_one_token(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigError, match="CLIENT_TOKEN_FILE"):
        read_token(str(tmp_path / "token"))


def test_an_edit_keeps_comments_order_and_rights(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    first, second, third = entry("a"), entry("b", "two"), entry("c", "three")
    path.write_text(f"# ours\n{line_of(first)}\n\n  {line_of(second)}\n")
    path.chmod(0o640)

    edit_tokens(path, lambda now: ([*[e for e in now if e.name != "a"], third], None))

    assert path.read_text() == f"# ours\n\n  {line_of(second)}\n{line_of(third)}\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["tokens"]


class Account:
    """An account that may set no owner, and the groups of `may_set` only; files of others have its ids."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, *may_set: int) -> None:
        self.path, self.may_set = path, may_set
        self.before, self.group = path.read_text(), 4002
        self._stat = Path.stat
        monkeypatch.setattr(os, "chown", self.chown)
        monkeypatch.setattr(Path, "stat", lambda path, **how: self.stat(path, **how))  # noqa: PLW0108  # binds

    def chown(self, path: Path, owner: int, group: int) -> None:
        if owner != -1 or group not in self.may_set:
            raise PermissionError
        self.group = group

    def stat(self, path: Path, **how: bool) -> os.stat_result:
        found = list(self._stat(path, **how))
        found[4:6] = [4001, 4003] if path == self.path else [4002, self.group]
        return os.stat_result(found)


@pytest.mark.parametrize(
    ("mode", "groups", "owners_groups", "kept"),
    [
        (0o640, [4003], [4003], True),
        (0o640, [4003], [4001], False),  # the owner would lose it
        (0o640, [], [4003], False),  # the group would
        (0o600, [4003], [4003], False),
        (0o644, [], [4001], True),
        (0o640, [4003], None, False),  # an owner that this machine does not know
    ],
)
def test_an_edit_by_another_account_keeps_readers_or_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: int,
    groups: list[int],
    owners_groups: list[int] | None,
    kept: bool,
) -> None:
    path = tmp_path.resolve() / "tokens"
    path.write_text(line_of(entry("a")) + "\n")
    path.chmod(mode)

    def known(user: int) -> pwd.struct_passwd:
        if owners_groups is None:
            raise KeyError(user)
        return pwd.struct_passwd(("app", "x", user, owners_groups[0], "", "/", "/bin/sh"))

    monkeypatch.setattr(pwd, "getpwuid", known)
    monkeypatch.setattr(os, "getgrouplist", lambda name, group: owners_groups)
    with monkeypatch.context() as during:
        account = Account(during, path, *groups)
        with contextlib.nullcontext() if kept else pytest.raises(OSError, match=r"owner 4001.*as root"):
            edit_tokens(path, lambda now: ([], None))

    assert account.group in (groups or [4002])
    assert path.read_text() == ("" if kept else account.before)
    assert path.stat().st_mode & 0o777 == mode
    assert [p.name for p in tmp_path.iterdir()] == ["tokens"]


def test_a_killed_edit_does_not_block_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(now: Sequence[TokenEntry]) -> tuple[Sequence[TokenEntry], None]:
        return [*now, entry()], None

    with monkeypatch.context() as killed:  # what a kill leaves: nothing is tidied up
        killed.setattr(Path, "replace", lambda path, to: (_ for _ in ()).throw(SystemError))
        killed.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        with pytest.raises(SystemError):
            edit_tokens(tmp_path / "tokens", add)
    assert len(list(tmp_path.iterdir())) == 1

    edit_tokens(tmp_path / "tokens", add)

    assert [p.name for p in tmp_path.iterdir()] == ["tokens"]


def test_a_new_file_is_private_and_a_wrong_one_is_kept(tmp_path: Path) -> None:
    def add(now: Sequence[TokenEntry]) -> tuple[Sequence[TokenEntry], None]:
        return [*now, entry()], None

    edit_tokens(tmp_path / "tokens", add)
    assert (tmp_path / "tokens").stat().st_mode & 0o777 == 0o600
    (tmp_path / "tokens").write_text("shop\n")
    with pytest.raises(ConfigError, match="tokens:1"):
        edit_tokens(tmp_path / "tokens", add)
    assert (tmp_path / "tokens").read_text() == "shop\n"


# --- the authenticator


def code_of(authenticator: Authenticator, scope: Scope, header: bytes | None) -> str:
    try:
        return authenticator.authenticate(scope, header, "192.0.2.7").name
    except HttpError as error:
        challenge = dict(error.headers)[b"www-authenticate"]
        return (
            f"{error.status} {error.content['code']}" if challenge.startswith(b"Bearer") else "no challenge"
        )


def test_scopes_and_times_decide_on_requests(tmp_path: Path) -> None:
    clock = SettableClock(NOW_MS)
    write(
        tmp_path / "tokens",
        entry("shop", "one", "send"),
        entry("ada", "two", "operate", "rank"),
        entry("old", "three", "send", expires_ms=NOW_MS + 2000),
    )
    authenticator = Authenticator(TokenFile(str(tmp_path / "tokens"), clock), clock)

    assert code_of(authenticator, "send", b"Bearer one") == "shop"
    assert code_of(authenticator, "rank", b"Bearer one") == "403 token_scope"
    assert (
        code_of(authenticator, "operate", b"Bearer two")
        == code_of(authenticator, "rank", b"Bearer two")
        == "ada"
    )
    assert (
        code_of(authenticator, "send", None)
        == code_of(authenticator, "send", b"Basic one")
        == "401 token_missing"
    )
    assert code_of(authenticator, "send", b"Bearer One") == "401 token_unknown"
    assert code_of(authenticator, "send", b"Bearer three") == "old"
    clock.advance(2)
    assert code_of(authenticator, "send", b"Bearer three") == "401 token_expired"
    assert authenticator.figures() == {
        "clients": 0,
        "requests": {"shop": 1, "ada": 2, "old": 1},
        "refused": {
            ("token_scope", "shop"): 1,
            ("token_missing", ""): 2,
            ("token_unknown", ""): 1,
            ("token_expired", "old"): 1,
        },
        "tokens": 2,
        "tokens_file_wrong": 0,
    }


def test_tokens_of_one_name_are_valid_until_removed(tmp_path: Path) -> None:
    clock = SettableClock(NOW_MS)
    old, new = entry("shop", "old"), entry("shop", "new")
    write(tmp_path / "tokens", old, new)
    authenticator = Authenticator(TokenFile(str(tmp_path / "tokens"), clock), clock)

    assert (
        code_of(authenticator, "send", b"Bearer old")
        == code_of(authenticator, "send", b"Bearer new")
        == "shop"
    )
    write(tmp_path / "tokens", new)
    clock.advance(1)
    assert code_of(authenticator, "send", b"Bearer old") == "401 token_unknown"
    assert code_of(authenticator, "send", b"Bearer new") == "shop"


@pytest.mark.parametrize("token", [None, b"Bearer other", b"Bearer old", b"Bearer one"])
def test_a_refusal_says_where_tokens_come_from(token: bytes | None) -> None:
    entries = [entry("shop", "one", "send"), entry("shop", "old", "operate", expires_ms=NOW_MS)]
    authenticator = Authenticator(None, SettableClock(NOW_MS), more=entries, hint="ask Ada")

    with pytest.raises(HttpError) as refused:
        authenticator.authenticate("operate", token, "192.0.2.7")

    assert refused.value.content["hint"] == "ask Ada"


def test_either_of_two_scopes_is_enough_where_a_route_says_so() -> None:
    entries = [entry(name, name, name) for name in SCOPES]
    authenticator = Authenticator(None, SettableClock(NOW_MS), more=entries)

    for name in ("send", "rank"):
        assert authenticator.authenticate("rank", f"Bearer {name}".encode(), "", None, "send").name == name
    with pytest.raises(HttpError, match="may not rank or send"):
        authenticator.authenticate("rank", b"Bearer operate", "", None, "send")


def test_without_tokens_none_is_required() -> None:
    registry = CollectorRegistry()
    authenticator = Authenticator()
    authenticator.register(registry)

    assert code_of(authenticator, "operate", None) == ""
    assert {s.value for f in registry.collect() for s in f.samples} <= {0.0}


def test_an_empty_file_refuses_all_requests(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("# none yet\n")

    assert (
        code_of(Authenticator(TokenFile(str(tmp_path / "tokens"))), "send", b"Bearer one")
        == "401 token_unknown"
    )
