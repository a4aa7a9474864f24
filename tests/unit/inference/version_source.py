"""Versions of a constant model, and a follower of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from freshet.inference.versions import VersionFollower
from freshet.model.inputs import ModelInputs
from freshet.types import F32
from freshet.versions import Manifest, VersionStore


class Constant:
    """A model that predicts its one weight."""

    def __init__(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        self.weight = float(tensors["weight"][0])

    def score(self, inputs: ModelInputs) -> F32:
        return np.full((inputs.size, 1), self.weight, np.float32)


def put(
    store: VersionStore, number: int, weight: float, *, spec_hash: str = "s1", name: str = "weight"
) -> None:
    store.put(
        Manifest(number, "shop", spec_hash, 0, 0, {}, "log", 100 + number, {}, 0, ""),
        {name: np.array([weight], np.float32)},
    )


def follower(store: VersionStore) -> VersionFollower:
    return VersionFollower(store, Constant, CollectorRegistry(), model="shop", spec_hash="s1", poll_s=1.0)
