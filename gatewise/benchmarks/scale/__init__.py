"""`gatewise bench scale`: training on 1, 2, 4, ... processes with the same batch in each (weak scaling)."""
