"""The file that describes a parallel job: its keys, what follows from them, and the template that `describe` writes."""
