"""The hot loops. Pure functions over arrays: no I/O, no state, no knowledge of plans, codecs or frameworks."""
