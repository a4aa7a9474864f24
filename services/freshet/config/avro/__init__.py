"""Avro schemas: parsing, resolution, paths to fields, logical types."""
