"""Event log in SQLite files."""
