"""Contract suites for adapters, a settable clock, scripted faults and references, for tests."""
