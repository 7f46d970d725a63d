"""Timelines of runs: what every process tells its observer, on one clock, in a file that trace viewers open.

While a run lasts each process keeps its spans in files of its own (``spans``), which outlive it however it ends. They
lie in a folder beside the timeline (``folder``), are put on rank 0's clock (``clocks``) and become one file: by the
launcher that has started all processes, or over the session at its end (``recording``). ``chrome`` writes the file,
``tracks`` says what stands in which line of it, ``window`` cuts one iteration out.
"""
