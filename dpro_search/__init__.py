"""dpro-search: record a distributed training job, replay it under changed strategies, search, export and prove the best plan."""

__version__ = "0.1.0"
