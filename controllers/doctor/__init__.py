"""`weft doctor --try` and `--gpu`: checks that run, each in its own process, and their report."""
