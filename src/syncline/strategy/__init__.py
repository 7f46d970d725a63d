"""Strategies: their text of five words, the values of each word, valid combinations, and the resolution of ``auto``.

``grammar`` has the syntax, ``words`` binds a text to registered parts and defines the five words and the presets,
``rules`` validates combinations, ``choice`` selects algorithms by size. ``strategy`` defines the value that the rest of
the package reads.
"""
