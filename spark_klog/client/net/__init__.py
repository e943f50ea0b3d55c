"""Connections to one broker: sockets, the handshake, frames, requests in flight, and waiting for them."""
