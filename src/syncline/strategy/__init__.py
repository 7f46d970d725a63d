"""Strategies: their text of five words, the values of each word, valid combinations, and the resolution of ``auto``.

``grammar`` has the syntax, ``parts`` binds a text to registered parts, ``words`` defines the five words, ``rules``
validates combinations, ``choice`` selects algorithms by size, ``presets`` names whole strategies. ``strategy`` defines
the value that the rest of the package reads.
"""
