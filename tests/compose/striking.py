"""Containers that are killed in turn, while a stack is under load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from freshet.testing.conditions import wait_until
from tests.compose.stack import Stack

ON_S = 90.0
"""For the work to go on after one of them was killed."""


def kill_each(stack: Stack, services: Sequence[str], samples: Callable[[], int]) -> None:
    """Kill each and start it again; wait until learning is past what was in the log of samples before.

    Args:
        samples: how many are in the log.
    """
    for name in services:
        before = samples()
        stack.kill(name)
        back_s = stack.up(name)
        on_s = learned_past(stack, before, f"after {name}")
        print(f"{name:12} healthy {back_s:5.1f} s after the kill; {on_s:4.1f} s later learning was past it")


def learned_past(stack: Stack, samples: int, when: str) -> float:
    """Wait until dense weights have learned from more than as many samples; how long it took, in seconds."""
    return wait_until(
        f"learning goes on {when}", lambda: sum(stack.applied().values()) > samples, within_s=ON_S
    )
