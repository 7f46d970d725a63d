"""Results as people read them: tables for the terminal, charts, one self-contained HTML page.

A file for each kind of result has its rows, its JSON and its columns; ``columns`` shows any of them, ``page`` and
``charts`` make the page. Nothing here measures, starts processes or knows what a strategy does: a page can be made on
another machine from the JSON file alone.
"""
