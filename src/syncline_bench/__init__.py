"""The laboratory of Syncline: measurements, predictions, reports and the command line. The library imports none of it.

Every benchmark runs its peers (the alternatives to Syncline) on the same work in the same run.

``compare`` trains one workload under several strategies and peers. Each of its processes runs the script ``train``.
``site`` decides where and how these processes start, ``messages`` carries their reports, ``measure`` computes the rows
of the result file, and ``machine`` describes the machine. ``collectives``, ``codecs``, ``gradients``, ``steps`` and
``calibration`` are the other benchmarks. ``report`` renders results, ``predict`` simulates other clusters, ``tuner``
searches strategies, ``lab`` makes hosts with slow links, and ``cli`` defines the commands.
"""
