"""Programs that use libraries built on `torch.nn.LSTM`, each run as it is and again after one line of gatewise.

`make clients` runs them, each in an environment of its own with pinned versions, and compares their numbers.
"""
