"""One program for each library: `python -m clients.programs.NAME` in an environment that has the library."""
