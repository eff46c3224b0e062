"""How fast searches are, and what their parts bring."""
