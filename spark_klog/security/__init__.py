"""TLS and SASL of the client: settings, key stores, sockets, mechanisms."""
