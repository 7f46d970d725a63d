"""Whether JAX and optax are there, and new enough; imported before anything of theirs."""

from .._packages import check_packages

check_packages("jax", {"jax": (0, 10), "optax": (0, 2, 8)})
