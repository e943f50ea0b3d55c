"""TLS and SASL of the client: settings, sockets, mechanisms. Only `client` imports it."""
