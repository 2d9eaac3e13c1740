"""The mathematics: the steps of LSTM variants with their hand-derived adjoints, in plain torch, any dtype, any device."""
