"""The feature spec: `freshet.toml` as frozen objects, with its rules, identity and layout.

`parse` reads the text, `rules` and `schema_fit` refuse contradictions, `render` writes it, `identity` decides
which edits need a new model, and `layout` assigns the rows and columns of a model.
"""

from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec, parse_spec

__all__ = ["Spec", "load_spec", "parse_spec"]
