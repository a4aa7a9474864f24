"""The batch stream between embedders and trainer ranks: its protocol, frames and gRPC client."""
