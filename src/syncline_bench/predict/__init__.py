"""Prediction: what collectives and training iterations take on networks that files of constants describe."""
