"""The newest learned samples, on which the gate compares versions."""

import numpy as np

from freshet.batches.stream import RecentSamples
from freshet.testing.clock import SettableClock
from tests.fixtures.specs import make_batch, make_spec


def test_batches_without_samples_are_not_kept() -> None:
    """They would push nothing out, so a stream of refused samples would fill the memory."""
    spec, recent = make_spec(), RecentSamples(8, SettableClock())
    batch, empty = (make_batch(spec, size, np.random.default_rng(0)) for size in (4, 0))
    recent.add(empty)
    recent.add(batch)
    recent.keep(empty)
    recent.add(batch)
    recent.keep(empty)

    assert [kept.size for kept in recent.newest(9)] == [4, 4]
