"""`gatewise bench lstm` and `gru`: a layer of gatewise beside that of PyTorch over a grid of shapes."""
