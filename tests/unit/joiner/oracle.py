"""Reference join with dicts and lists, to compare the native join with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from freshet._native import join_kept, join_sample_id
from freshet.joiner.plan import JoinPlan
from tests.fixtures.join_events import Action, Served, Shown, key_of, type_of


@dataclass
class Impression:
    name: str
    payload: str
    time: int
    shown: bool = False
    matched: set[int] = field(default_factory=set)
    decided: set[int] = field(default_factory=set)
    shown_at: int = 0
    matched_at: dict[int, int] = field(default_factory=dict)  # label -> time of its first action
    amounts: dict[int, list[tuple[int, int, float | None]]] = field(default_factory=dict)


@dataclass
class Waiting:
    event: Action | Shown
    order: int
    orphan: bool = False


class Oracle:
    """Labels are binary, or numeric with sum, max or last of `action.amount`."""

    def __init__(self, plan: JoinPlan) -> None:
        self.plan = plan
        self.windows = []
        for label in plan.labels:
            window, at = 0, label
            while True:
                window = max(window, at.window_ms)
                if at.given < 0:
                    break
                at = plan.labels[at.given]
            self.windows.append(window)
        self.horizon = max(self.windows) + 2 * plan.grace_ms
        self.remembered = self.horizon + max(self.windows)
        self.w = -(10**9)
        self.began: int | None = None
        self.impressions: dict[str, Impression] = {}
        self.seen: dict[str, int] = {}
        self.waiting: dict[str, list[Waiting]] = {}
        self.out: list[tuple[str, int, float, float]] = []
        self.late: list[str] = []
        self.counts: Counter[str] = Counter()
        self.labels: list[Counter[str]] = [Counter() for _ in plan.labels]
        self.arrivals = 0

    def serve(self, event: Served) -> None:
        for item in event.items:
            name, payload = f"{event.request}/{item}", f"<{event.request}|{item}|{event.time}>"
            if self.w >= event.time + self.horizon:
                self.counts["impressions_late"] += 1
                for label in self.labels:
                    label["late"] += 1
                self.late.append(payload)
            elif name in self.impressions:
                self.counts["impressions_repeated"] += 1
            else:
                self.counts["impressions"] += 1
                self.began = event.time if self.began is None else self.began
                one = self.impressions[name] = Impression(name, payload, event.time)
                for waiting in self.waiting.pop(name, []):
                    if not self.apply(one, waiting.event, counted=waiting.orphan):
                        self.waiting.setdefault(name, []).append(waiting)

    def show(self, event: Shown) -> None:
        if self.w >= event.time + self.horizon:
            self.counts["shown_late"] += 1
        elif event.impression in self.impressions:
            if not self.apply(self.impressions[event.impression], event):
                self.wait(event)
        else:
            self.wait(event)

    def act(self, event: Action) -> None:
        if not any(type_of(event.type) == type_of(label.name) for label in self.plan.labels):
            self.counts["actions_no_label"] += 1
        elif self.w >= event.time + self.horizon:
            self.counts["actions_late"] += 1
        elif event.id in self.seen:
            self.counts["actions_repeated"] += 1
        else:
            assert event.id is not None
            self.seen[event.id] = event.time
            if event.impression in self.impressions:
                if not self.apply(self.impressions[event.impression], event):
                    self.wait(event)
            else:
                self.wait(event)

    def wait(self, event: Action | Shown) -> None:
        self.arrivals += 1
        self.waiting.setdefault(event.impression, []).append(Waiting(event, self.arrivals))

    def apply(self, one: Impression, event: Action | Shown, *, counted: bool = False) -> bool:
        """Apply an event; returns False after every window, where the event continues to wait."""
        outcome = self.shown(one, event) if isinstance(event, Shown) else self.acted(one, event)
        if outcome != "beyond" and not counted:
            self.counts[f"{'shown' if isinstance(event, Shown) else 'actions'}_{outcome}"] += 1
        self.early(one)
        return outcome != "beyond"

    def shown(self, one: Impression, event: Shown) -> str:
        if event.time < one.time - self.plan.grace_ms:
            return "outside"
        if event.time > one.time + max(self.windows):
            return "beyond"
        if one.shown:
            return "repeated"
        if self.w >= one.time + max(self.windows) + self.plan.grace_ms:
            return "late"
        one.shown, one.shown_at = True, event.time
        return "matched"

    def acted(self, one: Impression, event: Action) -> str:
        found = set()
        for i, label in enumerate(self.plan.labels):
            if type_of(label.name) != type_of(event.type):
                continue
            if event.time < one.time - self.plan.grace_ms:
                found.add("outside")
            elif event.time > one.time + label.window_ms:
                found.add("beyond")
            elif label.value is None and i in one.matched:
                found.add("again")
            elif i in one.decided:
                found.add("late")
            else:
                one.matched.add(i)
                one.matched_at.setdefault(i, event.time)
                self.arrivals += 1
                one.amounts.setdefault(i, []).append((event.time, self.arrivals, event.amount))
                found.add("matched")
        return next(o for o in ("matched", "again", "late", "outside", "beyond") if o in found)

    def early(self, one: Impression) -> None:
        if not self.plan.early or (self.plan.require_shown and not one.shown):
            return
        for i, label in enumerate(self.plan.labels):
            ready = i in one.matched and i not in one.decided and label.value is None
            if ready and (label.given < 0 or label.given in one.matched):
                self.release(one, i)

    def release(self, one: Impression, i: int) -> None:
        """Hold a positive for a part of the wait that falls from all to none during the label-delay
        warm-up."""
        assert self.began is not None
        ramp, wait = self.plan.ramp, self.windows[i] + self.plan.grace_ms
        age = max(0, one.time - self.began)
        until = one.time + (wait - age // ramp if age < ramp * wait else 0)
        times = [one.matched_at[i]]
        if self.plan.labels[i].given >= 0:
            times.append(one.matched_at[self.plan.labels[i].given])
        if self.plan.require_shown:
            times.append(one.shown_at)
        if until == one.time or max(times) >= until:  # became true after its hold
            self.emit(one, i, 1.0, 1.0, "trained_positive")
        elif self.w >= until:
            self.emit(one, i, 1.0, float(np.float32(1 - 1 / ramp)), "trained_positive")

    def emit(self, one: Impression, i: int, value: float, weight: float, counter: str) -> None:
        self.out.append((one.payload, i, value, weight))
        self.settle(one, i, counter)

    def settle(self, one: Impression, i: int, counter: str) -> None:
        one.decided.add(i)
        self.labels[i][counter] += 1

    def value(self, one: Impression, i: int) -> float | None:
        label = self.plan.labels[i]
        if label.value is None:
            return 1.0 if i in one.matched else 0.0
        amounts = [(t, n, a) for t, n, a in one.amounts.get(i, []) if a is not None]
        kind = label.value.aggregates[0].name
        if kind == "sum":
            return float(sum(a for _, _, a in amounts))
        if not amounts:
            return None
        return max(a for _, _, a in amounts) if kind == "max" else max(amounts)[2]

    def decide(self, one: Impression, i: int) -> None:
        label = self.plan.labels[i]
        if self.plan.require_shown and not one.shown:
            self.settle(one, i, "not_shown")
        elif label.given >= 0 and label.given not in one.matched:
            self.settle(one, i, "given_false")
        elif i not in one.matched and not join_kept(
            join_sample_id(*key_of(one.name), i), self.plan.negatives
        ):
            self.settle(one, i, "sampled_out")
        elif (value := self.value(one, i)) is None:
            self.settle(one, i, "no_value")
        elif i in one.matched:
            self.emit(one, i, value, 1.0, "trained_positive")
        else:
            self.emit(one, i, value, 1 / self.plan.negatives, "trained_negative")

    def advance(self, w: int) -> None:
        self.w = max(self.w, w)
        for one in self.impressions.values():
            self.early(one)
            for i in sorted(range(len(self.windows)), key=lambda i: self.windows[i]):
                if i not in one.decided and self.w >= one.time + self.windows[i] + self.plan.grace_ms:
                    self.decide(one, i)
        for name, waiting in list(self.waiting.items()):
            for one_waiting in waiting:
                if not one_waiting.orphan and self.w >= one_waiting.event.time + self.plan.grace_ms:
                    one_waiting.orphan = True
                    self.counts[
                        "shown_orphan" if isinstance(one_waiting.event, Shown) else "actions_orphan"
                    ] += 1
            left = [x for x in waiting if self.w < x.event.time + self.horizon]
            self.waiting[name] = left
            if not left:
                del self.waiting[name]
        self.impressions = {n: i for n, i in self.impressions.items() if self.w < i.time + self.remembered}
        self.seen = {n: t for n, t in self.seen.items() if self.w < t + self.horizon}

    def take(self) -> list[tuple[str, int, float, float]]:
        out, self.out = self.out, []
        return sorted(out)
