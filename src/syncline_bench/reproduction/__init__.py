"""Published figures beside what the models of ``predict`` give for the same setting, computed when asked."""
