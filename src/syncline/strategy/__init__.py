"""Strategies: the text of five words, what each word may be, which go together, and what ``auto`` becomes.

``grammar`` is the syntax, ``parts`` binds a text to what is registered, ``words`` has the five, ``rules`` what goes
together, ``choice`` what is chosen by size, ``presets`` names for whole strategies; ``strategy`` is the value that the
rest of the package reads.
"""
