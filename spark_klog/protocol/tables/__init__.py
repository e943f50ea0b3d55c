"""One table an API: a line a field, with its versions."""
