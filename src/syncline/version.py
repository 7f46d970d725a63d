"""The version of this package, which the ranks of a run compare."""

__version__ = "0.1.0"
