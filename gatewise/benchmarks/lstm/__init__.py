"""`gatewise bench lstm` and `gru`: a layer of gatewise compared with PyTorch's over a grid of shapes."""
