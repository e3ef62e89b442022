"""What a model is worth: tasks, scores, statistics of newcomers, probes."""
