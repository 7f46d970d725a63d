"""Costs: what plans, codecs and iterations take on a network of a few numbers, for whoever chooses in a run."""
