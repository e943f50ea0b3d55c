"""The tests; a package, so that `tests.support` can be imported however pytest is started."""
