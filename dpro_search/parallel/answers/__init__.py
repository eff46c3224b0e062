"""Answers about a described job beside its step time: where the time goes, how sure a prediction is, what would help."""
