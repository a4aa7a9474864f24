"""The services: which `freshet up` starts, and which run by themselves only."""

__all__ = ["BESIDE", "ROLES"]

ROLES = ("gateway", "joiner", "trainer", "inference", "console")
"""Of a run on one machine: what `freshet up` starts."""
BESIDE = ("embedder", "paramserver")
"""Started by hand, or by what runs services in a cluster."""
