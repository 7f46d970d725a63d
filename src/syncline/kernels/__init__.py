"""The hot loops: functions over arrays and raw memory, compiled to machine code on first use.

Kernels do no I/O except on sockets and memory that a caller hands them, and know nothing of plans, codecs or
frameworks; ``engine``, ``wire``, ``codecs`` and others import them. ``cpu`` has the loops that NumPy runs, ``cuda`` the
loops for a GPU, in Triton. Start reading in ``passes``, a short kernel; ``aot`` has the machinery that compiles and
calls them (docs/concepts/kernels.md).
"""
