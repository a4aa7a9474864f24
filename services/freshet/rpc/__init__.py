"""gRPC: channels and listeners, and the frames that they carry."""
