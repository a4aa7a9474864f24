"""How a configuration is described and read: forms of values, options of frozen objects, sections with
their errors.

The spec and the settings are both made of these. An option is a dataclass field that carries its key, the
form of its value, its meaning and its kind; the parser, the errors, the reference in the docs and `freshet
check` follow from it.
"""

from freshet.config.options.forms import (
    MISSING,
    Boolean,
    Choice,
    Duration,
    Form,
    Integer,
    ListOf,
    Missing,
    Number,
    Text,
    Wrong,
    duration_text,
    nearest_hint,
)
from freshet.config.options.section import Kind, Section, default_of, key_of, option, options_of, read_object

__all__ = [
    "MISSING",
    "Boolean",
    "Choice",
    "Duration",
    "Form",
    "Integer",
    "Kind",
    "ListOf",
    "Missing",
    "Number",
    "Section",
    "Text",
    "Wrong",
    "default_of",
    "duration_text",
    "key_of",
    "nearest_hint",
    "option",
    "options_of",
    "read_object",
]
