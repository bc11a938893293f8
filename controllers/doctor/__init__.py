"""doctor: tries on a machine what the tests cannot, because they have no GPU; `weft doctor`."""
