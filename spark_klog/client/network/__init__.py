"""Sockets, frames, requests and responses of one connection."""
