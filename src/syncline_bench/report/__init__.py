"""Result rows to things people read: tables for the terminal, charts, one self-contained HTML page, drawn plans.

``rows`` is the result file itself (what the JSON holds); ``units`` writes its numbers; ``table``, ``charts`` and
``page`` show it. Nothing here measures, starts processes or knows what a strategy does: a page can be made on another
machine from the JSON file alone.
"""
