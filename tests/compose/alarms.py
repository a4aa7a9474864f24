"""Alerts made to fire on a running stack, by breaking what each is about: how long each took.

    python -m tests.compose.alarms                     # all, about three hours
    python -m tests.compose.alarms FreshetDown ...     # these

Needs a docker engine and built images. Breaks stand in groups that do not hide each other's effects; after
each group the damage is repaired, and nothing may fire any more before the next. One stack requires tokens
and has shards with hardly any memory; one begins with rows that take a while to load; another keeps events
for minutes, for alerts that take a quarter of an hour to fire or compare with the half hours before.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from freshet.demo import DEMO_SPEC
from freshet.testing.conditions import wait_until
from tests.compose.breaking import STACKS, Broken, Group, Stacked, wait_for
from tests.compose.filled import fill
from tests.compose.prometheus import Prometheus
from tests.compose.stack import Stack

RESOLVED_S = 900.0


def main(wanted: Sequence[str]) -> None:
    """Break, wait, mend; print what fired. Exits with 1 if an alert did not fire, or went on firing."""
    known = {name for stacked in STACKS.values() for group in stacked.groups for name in group.alerts}
    if unknown := sorted(set(wanted) - known):
        sys.exit(f"expected alerts among {', '.join(sorted(known))}; found {', '.join(unknown)}")
    wrong: list[str] = []
    for name, stacked in STACKS.items():
        groups = [
            (group, [alert for alert in group.alerts if not wanted or alert in wanted])
            for group in stacked.groups
        ]
        if groups := [(group, alerts) for group, alerts in groups if alerts]:
            wrong += on_a_stack(name, stacked, groups)
    if wrong:
        sys.exit("\n".join(["not as expected:", *wrong]))


def on_a_stack(name: str, stacked: Stacked, groups: Sequence[tuple[Group, Sequence[str]]]) -> list[str]:
    """What was not as expected."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="freshet-alarms-") as made:
        folder = Path(made)
        stack = Stack(
            _spec(folder, stacked.retention), folder, tokens=stacked.tokens, variables=stacked.variables
        )
        stack.down(volumes=True)
        try:
            if stacked.rows:
                fill(stack, folder, stacked.rows)
            print(f"{name}: all healthy after {stack.up():.0f} s", flush=True)
            stack.up("simulator")
            prometheus = Prometheus(stack.prometheus)
            wait_for(prometheus, 'freshet_trainer_quality{of="served"}')  # something is learned
            broken = Broken(stack, prometheus, folder / "versions")
            for group, alerts in groups:
                wrong += make_fire(broken, group, alerts, is_last=group is groups[-1][0])
        finally:
            (said := Path(tempfile.gettempdir()) / f"alarms-{name}").mkdir(exist_ok=True)
            stack.keep_words(said)
            stack.down(volumes=True)
            stack.close()
    return wrong


def _spec(folder: Path, retention: str | None) -> Path:
    """The demo's folder, or a copy whose events and rows are kept for another time."""
    if retention is None:
        return DEMO_SPEC.parent
    shutil.copytree(DEMO_SPEC.parent, folder / "spec")
    spec_file = folder / "spec" / DEMO_SPEC.name
    spec_file.write_text(spec_file.read_text().replace('"15m"', f'"{retention}"'))
    return spec_file.parent


def make_fire(broken: Broken, group: Group, alerts: Sequence[str], *, is_last: bool) -> list[str]:
    """Break and mend what a group of alerts is about; returns what was not as expected."""
    wrong: list[str] = []
    print(f"{group.break_.__name__}: {inspect.getdoc(group.break_)}", flush=True)
    prometheus, seen = broken.prometheus, dict[str, float]()

    def all_fire() -> bool:
        for name in prometheus.firing():
            if name not in seen:
                seen[name] = time.monotonic() - began
                expected = "" if name in alerts else "  (besides)"
                print(f"  {name:28} fired {seen[name]:4.0f} s after the break{expected}", flush=True)
        return set(alerts) <= set(seen)

    with group.break_(broken):
        began = time.monotonic()
        try:
            wait_until("the alerts fire", all_fire, within_s=group.within_s, poll_s=1)
        except AssertionError:
            missing = sorted(set(alerts) - set(seen))
            wrong.append(f"  {group.break_.__name__}: did not fire within {group.within_s:.0f} s: {missing}")
            print(wrong[-1], flush=True)
    if is_last:
        return wrong
    try:
        after = wait_until("all is well", lambda: not prometheus.firing(), within_s=RESOLVED_S, poll_s=1)
        print(f"  nothing fires {after:.0f} s after it was mended", flush=True)
    except AssertionError:
        wrong.append(f"  {group.break_.__name__}: still firing: {sorted(prometheus.firing())}")
        print(wrong[-1], flush=True)
    return wrong


if __name__ == "__main__":
    main(sys.argv[1:])
