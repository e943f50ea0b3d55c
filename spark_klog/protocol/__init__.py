"""Messages: one declarative table an API, one generic codec. Record bytes stay opaque."""
