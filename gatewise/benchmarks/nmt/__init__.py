"""`gatewise bench nmt`: translation with attention, trained as plain PyTorch does it and as gatewise does."""
