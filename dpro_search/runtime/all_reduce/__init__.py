"""The library of all-reduces for training scripts, and the program that times all-reduces."""
