"""Records of running jobs, made inside the processes of their ranks."""
