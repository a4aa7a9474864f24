"""Measures of the code base and its vocabulary: `make lint` runs both.

`limits.toml` holds the limit and the ceiling of each measure: a measure above its ceiling fails. `words.toml`
holds the forbidden words.
"""
