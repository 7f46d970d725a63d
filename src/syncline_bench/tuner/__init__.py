"""``syncline tune``: finds the strategy that trains a workload fastest here, by predictions and measured steps.

``search`` runs a tuning; ``candidates`` defines its search space, ``foresight`` predicts candidates, and ``guard``
checks the accuracy of lossy ones.
"""
