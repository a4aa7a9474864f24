"""The compose file with compose.tokens.yml: who shows no token, a former one or one for other things is
turned away, and tokens change hands while everything runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from freshet.demo import DEMO_SPEC
from freshet.testing.conditions import wait_until
from tests.compose.stack import Stack

HASHES = "/run/freshet/doors/tokens"
CLIENT = "/run/freshet/client/client.token"
RANKED = json.dumps({
    "context": {"reader": "r-1", "age_group": "18-24", "device": "phone", "hour": 8},
    "candidates": [{"item": "i-1", "topic": "sport", "format": "article", "age_s": 60.0}],
    "dry_run": True,
})  # fmt: skip
SEEN_S = 15.0
"""A change of the file of hashes is seen within a second; beside everything else on the machine."""

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]


class Client:
    """Asks the published ports."""

    def __init__(self, stack: Stack) -> None:
        self._stack, self._client = stack, httpx.Client(timeout=10)

    def ranks(self, token: str | None) -> int:
        """The answer's status."""
        return self._post(f"{self._stack.inference}/v1/rank", RANKED, token)

    def sends(self, token: str | None) -> int:
        """The answer's status."""
        now_ms = time.time_ns() // 1_000_000
        click = {
            "event_id": f"e-{now_ms}",
            "request_id": "nobody's",
            "item": "i-1",
            "type": "click",
            "ts": now_ms,
        }
        return self._post(f"{self._stack.gateway}/v1/actions", json.dumps(click), token)

    def rolls_back(self, token: str | None) -> int:
        """The answer's status, for a version that does not exist."""
        return self._post(f"{self._stack.console}/api/rollback", '{"number": 1000000}', token)

    def close(self) -> None:
        """Ask no more."""
        self._client.close()

    def _post(self, url: str, body: str, token: str | None) -> int:
        shown = {} if token is None else {"Authorization": f"Bearer {token}"}
        headers = {"Content-Type": "application/json", **shown}
        return self._client.post(url, content=body, headers=headers).status_code


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """With required tokens, the demo's spec, and readers who are learned from."""
    made = Stack(DEMO_SPEC.parent, tmp_path, tokens=True)
    made.down(volumes=True)
    try:
        made.up()
        made.up("simulator")
        yield made
    finally:
        made.keep_words(tmp_path)
        made.down(volumes=True)
        made.close()


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    made = Client(stack)
    yield made
    made.close()


def test_tokens_are_required_and_rotate_while_everything_runs(stack: Stack, client: Client) -> None:
    made = {
        name: stack.in_secrets("cat", f"/run/freshet/{part}/{name}.token").strip()
        for name, part in (("client", "client"), *((one, "operator") for one in ("send", "rank", "operate")))
    }
    learned_from(stack)
    # without one, and with one for other things
    assert (client.ranks(None), client.sends(None), client.rolls_back(None)) == (401, 401, 401)
    rank = made["rank"]
    assert (client.ranks(rank), client.sends(rank), client.rolls_back(rank)) == (200, 403, 403)
    assert (client.sends(made["send"]), client.ranks(made["send"])) == (202, 403)
    assert client.rolls_back(made["operate"]) == 404
    assert client.rolls_back(stack.secret("console", "console/console.token")) == 404

    # another one of the same name, which its holder shows before the former is dropped
    new = token_of(stack, "new", "rank", "--scopes", "rank")["token"]
    ranked(client, new, 200)
    assert client.ranks(rank) == 200
    former = token_of(stack, "list")["tokens"]
    (id_,) = [one["id"] for one in former if one["name"] == "rank"][:1]
    token_of(stack, "drop", "rank", "--id", id_)
    ranked(client, rank, 401)
    assert client.ranks(new) == 200

    # a file that is taken away is made anew at the next start of `secrets`; twice
    for _ in range(2):
        before = stack.in_secrets("cat", CLIENT).strip()
        stack.in_secrets("rm", CLIENT)
        stack.docker("run", "--rm", "secrets")
        after = stack.in_secrets("cat", CLIENT).strip()
        ranked(client, after, 200)
        ranked(client, before, 401)
        learned_from(stack)  # readers whose token was refused take the new one

    said = json.loads(stack.docker("exec", "--no-TTY", "console", "freshet", "audit", "--json"))["lines"]
    assert [(one["action"], one["what"]["name"]) for one in said if one["action"].startswith("token")] == [
        *(("token new", name) for name in ("send", "rank", "operate", "client")),
        ("token new", "rank"),
        ("token drop", "rank"),
        ("token new", "client"),
        ("token new", "client"),
    ]
    assert "refused" in {one["outcome"] for one in said}, "who was not let roll back"


def token_of(stack: Stack, verb: str, *words: str) -> dict[str, Any]:
    """What `freshet token VERB` says."""
    said: dict[str, Any] = json.loads(
        stack.in_secrets("freshet", "token", verb, *words, "--file", HASHES, "--json")
    )
    return said


def ranked(client: Client, token: str, status: int) -> None:
    """Wait until a ranking is answered so."""
    wait_until(f"a ranking is answered {status}", lambda: client.ranks(token) == status, within_s=SEEN_S)


def learned_from(stack: Stack) -> None:
    """Wait until more is learned than now: readers rank and click."""
    before = sum(stack.applied().values())
    wait_until("readers are learned from", lambda: sum(stack.applied().values()) > before + 50, within_s=120)
