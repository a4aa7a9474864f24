"""freshet: streaming online learning for recommendation, ads and ranking models.

The public API, small and lazy: importing freshet loads neither torch, nor numpy, nor the native core. A name
is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freshet.apps.backtest import backtest
    from freshet.apps.local import local
    from freshet.apps.replay import replay
    from freshet.client import AsyncClient, Client
    from freshet.config.spec import Spec
    from freshet.config.spec.inputs import Parameter
    from freshet.config.spec.transforms import Transform
    from freshet.model.custom import Model

__all__ = ["AsyncClient", "Client", "Model", "Parameter", "Spec", "Transform", "backtest", "local", "replay"]

_HOMES = {
    "AsyncClient": "freshet.client",
    "Client": "freshet.client",
    "Model": "freshet.model.custom",
    "Parameter": "freshet.config.spec.inputs",
    "Spec": "freshet.config.spec",
    "Transform": "freshet.config.spec.transforms",
    "backtest": "freshet.apps.backtest",
    "local": "freshet.apps.local",
    "replay": "freshet.apps.replay",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'freshet' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
