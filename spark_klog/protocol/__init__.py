"""Requests and responses: a declarative table per API, and a generic codec. Record bytes stay opaque."""
