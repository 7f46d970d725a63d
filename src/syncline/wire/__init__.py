"""The foundation of transports: authenticated connections, the roll call, framed links, the watcher.

Nothing here knows about plans, gradients or strategies.
"""
