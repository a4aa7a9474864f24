"""Options, forms and sections: the schema and parser of the spec and the settings.

An option is a dataclass field with its key, the form of its value, its meaning and its kind. Parser, errors,
reference pages and `freshet check` derive from options.
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
