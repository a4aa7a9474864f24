"""A randomised model of the exactly-once protocol: see README.md in this folder."""
