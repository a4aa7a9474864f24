"""HTTP: server, routes, authentication, limits and TLS."""
