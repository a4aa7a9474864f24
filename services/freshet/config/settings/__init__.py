"""Settings: addresses, stores and bounds of each service, parsed once into frozen objects.

The spec (`freshet.config.spec`) defines the model; settings change no prediction. They come from environment
variables `FRESHET_<SERVICE>_<OPTION>` (`FRESHET_GATEWAY_PORT=7100`). The defaults fit one machine.
"""

from freshet.config.settings.common import Common, Grpc, Registry, RunFolder, Traces
from freshet.config.settings.parse import Settings, load_settings, variables
from freshet.config.settings.services import (
    Console,
    Embedder,
    Gateway,
    GrpcListener,
    Inference,
    Joiner,
    Simulator,
    Trainer,
)

__all__ = [
    "Common",
    "Console",
    "Embedder",
    "Gateway",
    "Grpc",
    "GrpcListener",
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
