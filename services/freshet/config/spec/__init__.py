"""The feature spec: `freshet.toml` from text to frozen objects, what follows from it, and what is said
about it.

`parse` reads, `rules` and `check` refuse, `render` writes, `identity` says which edits need a new model,
`layout` decides what rows and columns a model has, `expression` is the language of conditions and scores,
`avro` knows the users' schemas.
"""

from freshet.config.spec.model import Spec
from freshet.config.spec.parse import load_spec, parse_spec

__all__ = ["Spec", "load_spec", "parse_spec"]
