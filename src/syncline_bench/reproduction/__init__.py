"""``syncline reproduce``: compares published figures with predictions of ``predict`` for the same settings.

``page`` assembles the page from chapters; ``blocks`` judges figures and writes Markdown; ``simulating`` has the
networks and their simulations. The other modules have the chapters: ``clusters``, ``measured`` (with the published
tables) and ``systems``.
"""
