"""The tests; a package, so that `tests.support` is found however pytest is started."""
