"""TLS connections of the client, and the certificates and keys that they use."""
