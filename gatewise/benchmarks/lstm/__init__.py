"""`gatewise bench lstm`: gatewise.LSTM compared with torch.nn.LSTM over a grid of shapes."""
