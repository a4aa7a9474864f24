"""Batches for trainer ranks, and gradients in return: the stream and its gRPC client."""
