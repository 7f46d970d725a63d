"""Timelines of runs: the spans of all processes, on one clock, in a file for trace viewers.

During a run each process keeps its spans in its own files (``spans``), which survive it however it ends. They are in a
folder beside the timeline (``folder``). They are converted to rank 0's clock and merged into one file: by the launcher
that started all processes, or over the session at its end (``recording``). ``chrome`` writes the file and extracts one
iteration.
"""
