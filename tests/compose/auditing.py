"""What is in the stores of a stack, against what was acknowledged."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from freshet.config.spec import Spec
from freshet.config.spec.topics import topics_of
from freshet.testing.conditions import wait_until_nothing_differs
from tests.compose.stack import Stack
from tests.fixtures import audit
from tests.fixtures.members import read_to
from tests.fixtures.traffic import Impression


def assert_exact(
    stack: Stack,
    spec: Spec,
    folder: Path,
    impressions: Mapping[tuple[str, int], Impression],
    actions: Mapping[tuple[str, int], set[str]],
) -> None:
    """Everything acknowledged is learned once: in samples, rows, dense weights, and what serving answers.
    Stops the services that write.

    `folder`: where the versions are. Nothing is sent any more.
    """
    topics, log = topics_of(spec), audit.open_log(folder)
    stack.drain(log, topics, folder, len(impressions))
    books = audit.read_books(log, topics)
    log.close()
    print(f"{len(impressions)} impressions, {len(books.samples)} samples")
    for name in stack.of("inference"):
        wait_until_nothing_differs(partial(audit.against_serving, books, stack.url(name)), within_s=30)
    assert differences(stack, spec, folder, books, impressions, actions) == []


def differences(
    stack: Stack,
    spec: Spec,
    folder: Path,
    books: audit.Books,
    impressions: Mapping[tuple[str, int], Impression],
    actions: Mapping[tuple[str, int], set[str]],
) -> list[str]:
    """How log and stores differ from the books of the samples, and from what was acknowledged.

    Stops the services that write. All samples are in a version before.
    """
    log = audit.open_log(folder)
    ledger, ends = stack.joined()["ledger"], read_to(log, topics_of(spec).samples)
    log.close()
    for role in ("gateway", "joiner", "trainer", "embedder", "shard"):  # what shards hold is flushed
        stack.docker("stop", *stack.of(role))
    late = ledger["events"]
    excused = late["actions_late"] + late["actions_orphan"] + late["impressions_late"]
    labels = tuple(label.name for label in spec.labels)
    return [
        *audit.against_joiner(books, ledger, len(impressions) - late["impressions_late"]),
        *audit.against_acknowledged(books, impressions, actions, labels, excused=excused),
        *audit.against_offsets(ends, folder, spec),
        *audit.against_rows(books, folder, spec),
        *audit.against_dense(books, folder),
    ]
