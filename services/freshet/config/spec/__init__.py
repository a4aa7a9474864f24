"""The feature spec: `freshet.toml` as frozen objects, with its rules, identity and layout.

`inputs` and `model` have its keys, `parse` reads the text, `defaults` completes it, `rules` and `schemas`
refuse contradictions, `identity` writes it and decides which edits need a new model, `layout` assigns the
rows and columns of a model, and `topics` names its topics.
"""

from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec, parse_spec

__all__ = ["Spec", "load_spec", "parse_spec"]
