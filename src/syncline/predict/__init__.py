"""Predictions: what a plan costs on a network, without running it."""
