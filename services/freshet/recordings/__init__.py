"""Recorded streams as events: conversions of known data sets, and readers of csv, parquet and topics."""
