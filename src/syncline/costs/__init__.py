"""Costs: networks as numbers, what plans cost on them, and how long an iteration takes there."""
