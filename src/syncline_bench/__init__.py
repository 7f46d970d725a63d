"""The laboratory of Syncline: what measures, predicts and shows, and the command line. The library imports none of it.

What is measured is measured beside what a user would pick instead, on the same work, in the same run.

``compare`` trains one workload under several strategies and fills the rows of a result file; ``train`` is the script
that each of its processes runs, on the hosts of ``site``; ``peers`` are what stands beside Syncline there; ``measure``
holds the clocks and the arithmetic between them, ``bound`` what cannot be beaten; ``machine`` says where it all
happened. ``collectives``, ``codecs``, ``gradients``, ``steps`` and ``calibration`` are verbs of their own. ``report``
shows results, ``predict`` computes them for other clusters, ``lab`` makes hosts, ``cli`` has the verbs.
"""
