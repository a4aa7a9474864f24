"""Rows: the row store makes them durable, the row service looks them up and applies gradients."""
