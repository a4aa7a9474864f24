"""One process each: the composition roots. No other package imports services."""
