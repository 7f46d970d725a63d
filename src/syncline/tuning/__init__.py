"""Tuning: what a run measures to choose its algorithms, its codec and its schedule."""
