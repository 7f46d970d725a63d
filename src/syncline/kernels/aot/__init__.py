"""Compiles kernels ahead of their first call and calls them without Numba; docs/concepts/kernels.md says why.

Start reading in ``compiled``: how a function becomes a kernel, and how Python calls it. ``objects`` keeps the machine
code in the user's cache, ``native`` declares the instructions that kernels may use, and ``compiler`` runs Numba in a
process of its own. Only kernels and their tests import from here.
"""
