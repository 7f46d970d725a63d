"""Compression: what a codec remembers of a model, and how payloads that are no sums become one average.

``compression`` keeps a codec's memory of one model's buckets, ``updates`` carries what owners of weights tell;
``reducers`` has a file for every way of making one average.
"""
