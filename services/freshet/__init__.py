"""freshet: streaming online learning for recommendation, ads and ranking models.

The public API, small and lazy: importing freshet loads neither torch, nor numpy, nor the native core. A name
is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freshet.cli.backtesting import backtest
    from freshet.cli.local import local
    from freshet.cli.replaying import replay
    from freshet.client import AsyncClient, Client
    from freshet.model.custom import Model
    from freshet.spec import Spec
    from freshet.spec.parameters import Parameter
    from freshet.spec.transforms import Transform

__all__ = ["AsyncClient", "Client", "Model", "Parameter", "Spec", "Transform", "backtest", "local", "replay"]

_HOMES = {
    "AsyncClient": "freshet.client",
    "Client": "freshet.client",
    "Model": "freshet.model.custom",
    "Parameter": "freshet.spec.parameters",
    "Spec": "freshet.spec",
    "Transform": "freshet.spec.transforms",
    "backtest": "freshet.cli.backtesting",
    "local": "freshet.cli.local",
    "replay": "freshet.cli.replaying",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'freshet' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
