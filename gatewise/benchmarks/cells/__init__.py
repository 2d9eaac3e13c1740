"""`gatewise bench cells`: layers of every cell compared with loops over time in plain PyTorch."""
