"""The needs of each system that follows the fields of a plan: a module for each kind of job."""
