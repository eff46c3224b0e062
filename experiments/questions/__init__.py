"""Questions about training jobs from public threads, and the answers of `dpro-search` beside what came out."""
