"""Runs plans and reducers in the background of training.

``engine`` accepts exchanges and single messages; ``driver`` has the threads that make progress. ``order`` decides when
work may start and holds the state that threads share. ``scope`` is a group of processes whose orders are translated.
``watchdog`` detects stalls and finds the rank at fault. ``exchange`` runs plans over a transport: by messages, or in
mapped ``memory`` by ``scripts``. ``reducing`` runs compressed buckets. ``trace`` reports the start and end of
everything to an observer.
"""
