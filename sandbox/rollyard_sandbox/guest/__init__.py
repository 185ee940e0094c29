"""Code that runs inside the jail: standard library only."""
