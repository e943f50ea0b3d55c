"""The broker: server, one handler file an API, purgatory, registry, offset manager."""
