"""Predicts the times of collectives and training iterations on networks that are described by constants.

``asked`` parses and checks the question; ``networks`` loads networks; ``settings`` turns a strategy on a network into
stages on resources; ``iterations`` simulates them on a virtual clock; ``vary`` repeats the simulation with other
constants for intervals and bottlenecks; ``rows`` makes the result. ``collectives`` predicts collectives alone.
"""
