"""Results for readers: tables for the terminal, charts, one self-contained HTML page.

A file for each kind of result has its rows, its JSON and its columns; ``columns`` renders tables, ``page`` and
``charts`` make the page. This package measures nothing, starts no processes and does not know the meaning of
strategies: a page can be made on another machine from the JSON file alone.
"""
