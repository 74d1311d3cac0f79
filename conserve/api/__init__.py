"""ConServe from Python: handles of stores and jobs, and the functions that the command line calls too."""
