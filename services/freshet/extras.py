"""Optional dependencies: the extra that provides each module, and its installation command."""

from __future__ import annotations

EXTRAS = {
    "starlette": "gateway",
    "uvicorn": "gateway",
    "httptools": "gateway",
    "uvloop": "gateway",
    "torch": "trainer",
    "httpx": "client",
    "pyarrow": "replay",
    "fastavro": "replay",
    "confluent_kafka": "kafka",
    "redis": "redis",
    "grpc": "grpc",
    "google": "grpc",
    "obstore": "objects",
    "opentelemetry": "tracing",
    "vowpalwabbit": "versus",
}
"""{module that only some verbs need: extra that provides it}; a test compares it with pyproject.toml."""

_PACKAGES = {
    "confluent_kafka": "confluent-kafka",
    "grpc": "grpcio",
    "google": "protobuf",
    "opentelemetry": "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
}
"""{module: packages}, where the names differ; other projects own `grpc` and `google` on PyPI."""


def how_to_install(module: str) -> str:
    """Return the command that installs a module of `EXTRAS`.

    The command does not name freshet: that package on PyPI is another project.
    """
    package = _PACKAGES.get(module, module)
    return f'pip install {package}; or in a clone of freshet, pip install ".[{EXTRAS[module]}]"'
