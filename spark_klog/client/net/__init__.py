"""Sockets, frames and requests: connections to one broker, and requests that any broker or a coordinator answers."""
