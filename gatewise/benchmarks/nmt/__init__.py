"""`gatewise bench nmt`: training of translation with attention, in plain PyTorch and in gatewise."""
