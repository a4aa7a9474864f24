"""Where things run: addresses, stores and bounds of each service, parsed once into frozen objects.

What a model means stands in the spec (`freshet.spec`); nothing here changes a prediction. Settings come
from variables `FRESHET_<SERVICE>_<OPTION>` (`FRESHET_GATEWAY_PORT=7100`), the defaults fit one machine.
"""

from freshet.settings.doors import Console, Gateway, GrpcDoor, Inference, Simulator
from freshet.settings.learning import Embedder, Joiner, Trainer
from freshet.settings.model import Common, Settings
from freshet.settings.network import Grpc, Registry, Traces
from freshet.settings.parse import load_settings, variables
from freshet.settings.run_folder import RunFolder

__all__ = [
    "Common",
    "Console",
    "Embedder",
    "Gateway",
    "Grpc",
    "GrpcDoor",
    "Inference",
    "Joiner",
    "Registry",
    "RunFolder",
    "Settings",
    "Simulator",
    "Traces",
    "Trainer",
    "load_settings",
    "variables",
]
