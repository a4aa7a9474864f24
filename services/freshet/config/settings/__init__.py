"""Settings: addresses, stores and bounds of each service, parsed once into frozen objects.

The spec (`freshet.config.spec`) defines the model; settings change no prediction. They come from environment
variables `FRESHET_<SERVICE>_<OPTION>` (`FRESHET_GATEWAY_PORT=7100`). The defaults fit one machine.
"""

from freshet.config.settings.classes import Common, Settings
from freshet.config.settings.network import Grpc, Registry, Traces
from freshet.config.settings.parse import load_settings, variables
from freshet.config.settings.pipeline_services import Embedder, Joiner, Trainer
from freshet.config.settings.public_services import Console, Gateway, GrpcListener, Inference, Simulator
from freshet.config.settings.run_folder import RunFolder

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
