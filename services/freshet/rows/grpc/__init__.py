"""The row service over gRPC."""
