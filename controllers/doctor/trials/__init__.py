"""trials: what Weft does, tried on a machine with a random model, because the tests have no GPU; `weft doctor --try` and `--gpu`."""
