"""What each system needs to follow its fields of a plan: a module for each kind of job."""
