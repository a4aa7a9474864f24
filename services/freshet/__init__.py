"""freshet: streaming online learning for recommendation, ads and ranking models."""
