"""The world's visits and reactions in the words of the demo's schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from freshet.demo.world import DEVICES, FORMATS, GROUPS, TOPICS, Reactions, Visit, World
from freshet.types import I64

__all__ = ["actions_of", "candidates_of", "context_of", "item_name"]


def item_name(item: int) -> str:
    """What the catalogue calls an item."""
    return f"item-{item}"


def context_of(visit: Visit, request_id: str) -> dict[str, Any]:
    """Who asks, and when: the context of a rank request."""
    return {
        "request_id": request_id,
        "reader": f"reader-{visit.user}",
        "age_group": GROUPS[visit.group],
        "device": DEVICES[visit.device],
        "hour": visit.hour,
    }


def candidates_of(world: World, visit: Visit) -> list[dict[str, Any]]:
    """(C,) what could be shown: the candidates of a rank request."""
    columns = visit.items, world.items.topic(visit.items), world.items.format(visit.items), visit.ages_s
    return [
        {"item": item_name(item), "topic": TOPICS[topic], "format": FORMATS[form], "age_s": round(age, 1)}
        for item, topic, form, age in zip(*(column.tolist() for column in columns), strict=True)
    ]


def actions_of(
    visit: Visit, request_id: str, shown: I64, reactions: Reactions, shown_ms: int
) -> Iterator[dict[str, Any]]:
    """Clicks and purchases that follow a page, each with the time at which it will happen.

    Their ids follow from request and item, so that sending one again changes nothing.
    """
    for place in np.flatnonzero(reactions.clicked).tolist():
        item = item_name(int(visit.items[shown[place]]))
        kinds = [("click", reactions.click_after_s[place])]
        if reactions.bought[place]:
            kinds.append(("purchase", reactions.purchase_after_s[place]))
        for kind, after_s in kinds:
            yield {
                "event_id": f"{kind}-{request_id}-{item}",
                "request_id": request_id,
                "item": item,
                "type": kind,
                "ts": shown_ms + round(1_000 * float(after_s)),
            }
