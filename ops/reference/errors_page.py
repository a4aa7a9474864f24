"""Errors: the families, the codes of HTTP, the exits of the command."""

from __future__ import annotations

import inspect

import freshet.client
import freshet.errors
from freshet.cli import EXITS
from freshet.errors import FreshetError
from freshet.http.endpoint import CODES
from ops.reference.markdown import code, escaped, grid, header

INTRO = """\
An error says what was expected, what was found, where, and what to do next. There is one root,
`FreshetError`, and a family for each thing that its reader can do. A family is a class of
`freshet.errors` in Python, the first word of what the command prints, and an HTTP status.

## Families
"""

HTTP = """
## Codes of HTTP errors

`{"error": {"code", "message", "expected", "found", "hint"}}`. A code keeps its meaning, the texts may change.
The routes of the Open Inference Protocol say the same in one text, `{"error": "text"}`.
"""

EXIT = """
## Exit status of `freshet`

"""

STATUS = {
    "BadInput": "400, 422",
    "TooLarge": "413",
    "Overloaded": "429",
    "Unavailable": "503",
}


def page() -> str:
    """The whole page."""
    lines = [header("Errors", "services/freshet/errors.py and http/endpoint.py"), INTRO]
    families = [
        (code(name), _above(cls), STATUS.get(name, ""), escaped(inspect.getdoc(cls) or ""))
        for name, cls in vars(freshet.errors).items()
        if inspect.isclass(cls) and issubclass(cls, FreshetError)
    ]
    refused = freshet.client.EventsRefused
    told = escaped(inspect.getdoc(refused) or "")
    families.append(("`freshet.client.EventsRefused`", _above(refused), "422", told))
    lines += grid(families, ("family", "is a", "HTTP", "means, and what to do"))
    lines += [HTTP, *grid([_code(c) for c in CODES], ("code", "status", "means", "what to do")), EXIT]
    lines += grid([(str(status), means) for status, means in EXITS.items()], ("status", "means"))
    return "\n".join(lines) + "\n"


def _above(cls: type) -> str:
    parent = cls.__mro__[1].__name__
    return code(parent) if parent != "Exception" else ""


def _code(c: object) -> tuple[str, ...]:
    found = {name: str(getattr(c, name)) for name in ("code", "status", "means", "do")}
    return (code(found["code"]), found["status"], escaped(found["means"]), escaped(found["do"]))
