"""`gatewise bench models`: training steps of models that people write with `torch.nn.LSTM`, before and after."""
