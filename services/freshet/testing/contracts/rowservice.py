"""Promises of every row service; see `freshet.rows.service`.

The adapter's fixture gives a new service of a fixed small model: BUCKETS buckets, PARTITIONS partitions that
have applied nothing (offset 0), one store group with rows of WIDTH floats stepped by plain SGD with learning
rate 1, tables 0 and 1. So a row after a push is the row before it minus its gradient.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from freshet.errors import Fenced, Refused
from freshet.rows.service import KeyGroup, Push, RowService, RowStates
from freshet.types import F32, Fence, OffsetRange, TimeMs, bucket_of

__all__ = [
    "BUCKETS",
    "PARTITIONS",
    "WIDTH",
    "RowServiceContract",
    "keys_of",
    "look_up",
    "push_of",
    "push_of_steps",
]

BUCKETS, PARTITIONS, WIDTH = 16, 2, 2
DEADLINE_S = 60.0

Row = tuple[int, int]
"""(table, key)."""


def keys_of(rows: list[Row]) -> tuple[KeyGroup, list[Row]]:
    """Return a group of these rows, and their order in it."""
    ordered = sorted(
        set(rows), key=lambda row: (int(bucket_of(np.array([row[1]], np.uint64), BUCKETS)[0]), row)
    )
    keys = np.array([key for _, key in ordered], np.uint64)
    tables = np.array([table for table, _ in ordered], np.uint8)
    starts = np.searchsorted(bucket_of(keys, BUCKETS), np.arange(BUCKETS + 1)).astype(np.uint32)
    return KeyGroup(0, keys, tables, starts), ordered


def look_up(service: RowService, rows: list[Row], *, create: bool) -> dict[Row, list[float]]:
    """Return {row: values}."""
    group, ordered = keys_of(rows)
    out: F32 = np.full((len(ordered), WIDTH), 77.0, np.float32)
    service.lookup([group], [out], create=create)
    return dict(zip(ordered, out.tolist(), strict=True))


def push_of(
    ranges: Mapping[int, tuple[int, int]],
    gradients: Mapping[Row, list[float]],
    fence: int = 10,
) -> Push:
    """Build a push of {partition: (start, stop)} and {row: gradient}."""
    group, ordered = keys_of(list(gradients))
    pushed = np.array([gradients[row] for row in ordered], np.float32).reshape(len(ordered), WIDTH)
    covered = tuple(OffsetRange(p, start, stop) for p, (start, stop) in sorted(ranges.items()))
    return Push(covered, Fence(fence), TimeMs(1_700_000_000_000), [group], [pushed])


def push_of_steps(ranges: Mapping[int, tuple[int, int]], steps: Mapping[Row, list[list[float]]]) -> Push:
    """Build a push of {partition: (start, stop)} and {row: its gradients, one after the other}."""
    plain = push_of(ranges, {row: gradients[0] for row, gradients in steps.items()})
    group, ordered = keys_of(list(steps))
    counts = np.array([len(steps[row]) for row in ordered], np.uint32)
    gradients = np.array([one for row in ordered for one in steps[row]], np.float32)
    return replace(plain, groups=[group.repeated(counts)], gradients=[gradients])


A, B, C = (0, 3), (1, 3), (0, 2**63 + 5)
"""Two rows of one key in two tables, and one in another bucket."""


class RowServiceContract:
    """Subclass it and define the fixture `service`."""

    checks_fences_of_pushes = True
    """False: embedder and shard live under one claim in one process, so no push can carry a lower fence."""

    @pytest.fixture
    def service(self) -> RowService:
        """A new service of the model above; all buckets owned."""
        raise NotImplementedError("give the fixture `service`")

    # Lookups

    def test_an_absent_row_is_zeros_without_creation(self, service: RowService) -> None:
        for _ in range(2):
            assert look_up(service, [A, C], create=False) == {A: [0.0, 0.0], C: [0.0, 0.0]}

    def test_a_created_row_is_the_same_for_everybody(self, service: RowService) -> None:
        made = look_up(service, [A, B, C], create=True)
        assert look_up(service, [A, B, C], create=True) == made
        assert look_up(service, [C, A], create=False) == {A: made[A], C: made[C]}

    def test_no_keys_are_fine(self, service: RowService) -> None:
        assert look_up(service, [], create=True) == {}

    # Pushes

    def test_a_push_steps_its_rows_and_no_others(self, service: RowService) -> None:
        before = look_up(service, [A, B, C], create=True)
        assert service.push(push_of({0: (0, 5)}, {A: [1.0, 2.0], C: [0.5, 0.0]}))
        after = look_up(service, [A, B, C], create=True)
        np.testing.assert_allclose(np.subtract(before[A], after[A]), [1.0, 2.0], rtol=1e-6)
        np.testing.assert_allclose(np.subtract(before[C], after[C]), [0.5, 0.0], rtol=1e-6)
        assert after[B] == before[B]

    def test_a_push_to_an_absent_row_creates_it(self, service: RowService) -> None:
        assert service.push(push_of({0: (0, 1)}, {A: [3.0, -1.0]}))
        np.testing.assert_allclose(look_up(service, [A], create=False)[A], [-3.0, 1.0], atol=0.1)

    def test_pushes_step_the_rows_that_were_looked_up(self, service: RowService) -> None:
        """A client may name rows by their lookup; pushes of others, or of more rows, are as good."""
        before = look_up(service, [A, B, C], create=True)
        for i, rows in enumerate([(A, B, C), (A,), (B, C), (A, B, C)]):
            assert service.push(push_of({0: (i, i + 1)}, {row: [1.0, 0.0] for row in rows}))
            look_up(service, [A, C], create=True)
        assert service.push(push_of_steps({0: (4, 5)}, {A: [[1.0, 0.0]] * 3, C: [[1.0, 0.0]] * 2}))
        after = look_up(service, [A, B, C], create=True)
        steps = [before[row][0] - after[row][0] for row in (A, B, C)]
        np.testing.assert_allclose(steps, [6.0, 3.0, 5.0], rtol=1e-5)

    def test_several_gradients_of_a_row_are_steps_in_their_order(self, service: RowService) -> None:
        """Sizes show the order: in float32 a small step beside a huge one is lost."""
        before = look_up(service, [A, B, C], create=True)
        steps: dict[Row, list[list[float]]] = {
            A: [[1.0, 2.0], [1e9, 0.5], [-1e9, 0.25]],
            B: [[1e9, 0.0], [-1e9, 0.0], [1.0, 1.0]],
            C: [[0.5, 0.5]],
        }
        push = push_of_steps({0: (0, 5)}, steps)
        assert service.push(push)
        after = look_up(service, [A, B, C], create=True)
        for row, gradients in steps.items():
            expected = np.array(before[row], np.float32)
            for gradient in gradients:
                expected -= np.array(gradient, np.float32)
            assert after[row] == expected.tolist()
        assert service.push(push) is False
        assert look_up(service, [A, B, C], create=True) == after

    def test_several_gradients_of_an_absent_row_create_it_once(self, service: RowService) -> None:
        assert service.push(push_of_steps({0: (0, 1)}, {A: [[1.0, 0.0], [2.0, 0.0]], C: [[4.0, 0.0]] * 5}))
        after = look_up(service, [A, C], create=False)
        np.testing.assert_allclose([after[A][0], after[C][0]], [-3.0, -20.0], atol=0.1)

    def test_of_several_gradients_one_that_is_not_finite_is_left_out(self, service: RowService) -> None:
        before = look_up(service, [A], create=True)[A]
        assert service.push(push_of_steps({0: (0, 1)}, {A: [[1.0, 0.0], [float("nan"), 0.0], [2.0, 0.0]]}))
        np.testing.assert_allclose(look_up(service, [A], create=True)[A][0], before[0] - 3.0, rtol=1e-5)

    def test_a_push_repeated_after_a_lost_answer_changes_nothing(self, service: RowService) -> None:
        push = push_of({0: (0, 5), 1: (0, 2)}, {A: [1.0, 1.0]})
        assert service.push(push) is True
        rows = look_up(service, [A], create=False)
        assert service.push(push) is False
        assert look_up(service, [A], create=False) == rows
        assert self.offsets(service) == {0: [5], 1: [2]}

    def test_pushes_that_continue_are_applied_in_turn(self, service: RowService) -> None:
        before = look_up(service, [A], create=True)[A]
        for i in range(5):
            assert service.push(push_of({i % 2: (i // 2, i // 2 + 1)}, {A: [1.0, 0.0]}))
        np.testing.assert_allclose(look_up(service, [A], create=False)[A][0], before[0] - 5.0, rtol=1e-6)
        assert self.offsets(service) == {0: [3], 1: [2]}

    def test_a_push_without_rows_moves_every_bucket(self, service: RowService) -> None:
        assert service.push(push_of({1: (0, 9)}, {}))
        assert self.offsets(service) == {0: [0], 1: [9]}

    @pytest.mark.parametrize(
        "ranges",
        [
            {0: (6, 7)},  # a gap
            {0: (3, 8)},  # half applied
            {0: (5, 6), 1: (1, 2)},  # one continues, one has a gap
            {0: (0, 5), 1: (0, 1)},  # one applied, one continues
            {0: (4, 5), 1: (3, 4)},  # one applied, one has a gap
        ],
    )
    def test_a_push_with_a_gap_is_refused_with_the_applied_offsets(
        self, service: RowService, ranges: dict[int, tuple[int, int]]
    ) -> None:
        service.push(push_of({0: (0, 5)}, {A: [1.0, 1.0]}))
        rows = look_up(service, [A, B], create=True)
        with pytest.raises(Refused) as refused:
            service.push(push_of(ranges, {A: [1.0, 1.0], B: [1.0, 1.0]}))
        assert refused.value.applied[0] == 5
        assert refused.value.applied.get(1, 0) == 0
        assert look_up(service, [A, B], create=True) == rows
        assert self.offsets(service) == {0: [5], 1: [0]}

    def test_a_range_applied_in_two_pieces_is_skipped_as_one(self, service: RowService) -> None:
        service.push(push_of({0: (0, 2)}, {}))
        service.push(push_of({0: (2, 5)}, {}))
        assert service.push(push_of({0: (0, 5)}, {A: [1.0, 1.0]})) is False

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_gradients_that_are_not_finite_move_offsets_but_no_rows(
        self, service: RowService, bad: float
    ) -> None:
        rows = look_up(service, [A, C], create=True)
        assert service.push(push_of({0: (0, 1)}, {A: [1.0, bad], C: [1.0, 1.0]}))
        after = look_up(service, [A, C], create=True)
        assert after[A] == rows[A]
        assert np.isfinite(after[C]).all()
        assert self.offsets(service)[0] == [1]

    def test_pushes_of_two_threads_are_all_applied_once(self, service: RowService) -> None:
        before = look_up(service, [A], create=True)[A]
        errors: list[BaseException] = []

        def work(partition: int) -> None:
            try:
                for i in range(100):
                    assert service.push(push_of({partition: (i, i + 1)}, {A: [1.0, 0.5]}))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(p,)) for p in range(PARTITIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        np.testing.assert_allclose(
            np.subtract(before, look_up(service, [A], create=False)[A]), [200.0, 100.0], rtol=1e-4
        )

    def test_applied_offsets_match_rows_during_pushes(self, service: RowService) -> None:
        """A push subtracts one from each row, so a row counts its pushes."""
        group, rows = keys_of([(t, (k << 57) + k) for t in (0, 1) for k in range(1, 40)])
        before = look_up(service, rows, create=True)
        stop, moments = threading.Event(), set[int]()

        def push_on() -> None:
            for block in range(100_000):
                if stop.is_set():
                    return
                service.push(push_of({0: (block, block + 1)}, {row: [1.0, 0.0] for row in rows}))

        pushing = threading.Thread(target=push_on)
        pushing.start()
        try:
            lookups, deadline = 0, time.monotonic() + DEADLINE_S
            while lookups < 200 or len(moments) < 2:
                assert time.monotonic() < deadline, "nothing was pushed meanwhile"
                lookups += 1
                out: F32 = np.empty((len(rows), WIDTH), np.float32)
                states = RowStates([np.empty((len(rows), 0), np.float32)])
                service.lookup([group], [out], states=states)
                assert states.known is not None
                moment_of = states.known.moment_of.get(0, np.zeros(BUCKETS, np.uint32))
                told = states.known.offsets[moment_of[bucket_of(group.keys, BUCKETS)], 0]
                found = np.array([before[row][0] for row in rows]) - out[:, 0]
                np.testing.assert_array_equal(np.rint(found).astype(np.int64), told)
                moments.update(told.tolist())
        finally:
            stop.set()
            pushing.join()

    def test_a_push_of_a_lower_fence_is_fenced(self, service: RowService) -> None:
        if not self.checks_fences_of_pushes:
            pytest.skip("one claim covers embedder and shard")
        service.push(push_of({0: (0, 1)}, {A: [1.0, 1.0]}, fence=12))
        rows = look_up(service, [A], create=False)
        with pytest.raises(Fenced):
            service.push(push_of({0: (1, 2)}, {A: [1.0, 1.0]}, fence=11))
        assert look_up(service, [A], create=False) == rows
        assert service.push(push_of({1: (0, 1)}, {}, fence=11)), "fences are per partition"

    def offsets(self, service: RowService) -> dict[int, list[int]]:
        """Return the applied offsets of every bucket as lists."""
        return {partition: [int(o) for o in offsets] for partition, offsets in service.applied().items()}
