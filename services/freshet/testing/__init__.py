"""For those who test freshet or write an adapter: contract suites, a settable clock, faults by script,
references."""
