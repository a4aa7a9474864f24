"""Packages that only some of freshet needs: which extra brings each, and how who lacks one gets it."""

from __future__ import annotations

__all__ = ["EXTRAS", "how_to_install"]

EXTRAS = {
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
"""Modules that only some verbs need, and an extra that brings each; a test compares with pyproject.toml."""

_PACKAGES = {
    "confluent_kafka": "confluent-kafka",
    "grpc": "grpcio",
    "google": "protobuf",
    "opentelemetry": "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
}
"""What has a module that is called otherwise: packages named `grpc` or `google` are of other people."""


def how_to_install(module: str) -> str:
    """How a module of `EXTRAS` comes. Not by freshet's own name: on PyPI that is another project."""
    package = _PACKAGES.get(module, module)
    return f'pip install {package}; or in a clone of freshet, pip install ".[{EXTRAS[module]}]"'
