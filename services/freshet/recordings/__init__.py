"""Readers of recorded events and samples: known data sets, files, topics of another run."""
