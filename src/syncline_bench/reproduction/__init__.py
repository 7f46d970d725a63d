"""``syncline reproduce``: compares published figures with predictions of ``predict`` for the same settings.

``page`` assembles the page from chapters; ``blocks`` judges figures and writes Markdown; ``nets`` has the networks and
``simulating`` the simulations. The other modules have a chapter or more each: ``measured``, ``stages``, ``systems``,
``taihulight`` and ``tianhe``. ``tables`` reads published tables.
"""
