"""The row store in one SQLite file."""
