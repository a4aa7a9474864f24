"""The reference of the settings, from the options of the services' classes."""

from __future__ import annotations

from collections.abc import Iterator

from freshet.config.settings import SERVICES, variables
from ops.reference.markdown import default_text, escaped, first_paragraph, grid, header

INTRO = """\
What a model is stands in [its spec](feature-spec.md); where and within which bounds it runs stands here.
Settings are environment variables, read once at the start of a service. An unknown name that starts with
`FRESHET_` is an error.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(_page())


def _page() -> Iterator[str]:
    yield header("Settings: where things run", "services/freshet/settings")
    yield INTRO
    for service, cls in SERVICES.items():
        yield f"## {service}\n\n{first_paragraph(cls)}\n"
        rows = [
            (
                f"`{v.name}`",
                escaped(v.option.metadata["form"].expected),
                default_text(v.option),
                escaped(v.option.metadata["doc"]),
            )
            for v in variables()
            if v.service == service
        ]
        yield from grid(rows, ("variable", "allowed", "default", "meaning"))
        yield ""
