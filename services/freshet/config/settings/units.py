"""Units and forms that settings share."""

from __future__ import annotations

from freshet.config.options import Choice, Integer, Text

__all__ = [
    "CLIENT_REQUESTS",
    "CODEC",
    "GIB",
    "HOST",
    "HOSTS",
    "HOUR",
    "KIB",
    "MIB",
    "MINUTE",
    "PATH",
    "PEM",
    "PORT",
    "SECOND",
    "URL",
]

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000  # milliseconds
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PORT = Integer(0, 65_535)
PATH = Text("a path")
HOST = Text("an IP address or a host name", r"[A-Za-z0-9.:_-]{1,255}")
HOSTS = Text("host names with commas between", r"[A-Za-z0-9.:,_ -]{1,2000}")
CODEC = Choice(("fp32", "bf16", "fp16", "int8"))
URL = Text('an URL with the adapter as its scheme, such as "sqlite:run/log"', r"[a-z][a-z0-9+.-]*:.+")

CLIENT_REQUESTS = (
    "requests of one client: a token, unless its line says another number, or an address where no tokens are "
    "asked for; beyond it 429 with Retry-After. 0: no limit"
)
PEM = Text("the path of a PEM file")
