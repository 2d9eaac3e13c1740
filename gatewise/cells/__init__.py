"""The mathematics: steps of LSTM variants and their hand-derived adjoints, in plain torch, any dtype, any device."""
