"""The event log in SQLite files."""
