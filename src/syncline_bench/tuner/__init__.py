"""``syncline tune``: which strategy trains a workload fastest here, found by prediction and by real steps."""
