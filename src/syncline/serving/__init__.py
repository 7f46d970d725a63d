"""Weights that others hold: the side of their owners, and that of the workers. No framework."""
