"""Measurements at the start of a run, or in its first steps, that choose algorithm, codec and schedule for ``auto``.

``launch`` and ``frameworks`` import from here. There is a file for each choice: start reading in ``algorithm_choice``.
``codec_times`` measures codecs for the laboratory and for models of clusters that are not at hand.
"""
