"""The loss of real models over hundreds of steps, on every kernel, beside that of nn.LSTM.

    python -m gatewise.benchmarks.trajectories

What a user's training does is what runs here: autocast and GradScaler, states carried from batch to batch, dropout,
lengths, clipping, optimizers, `DistributedDataParallel`. A kernel passes where its loss, averaged over windows, stays
as close to that of nn.LSTM with the same seed as the losses of nn.LSTM with three seeds are to each other.
"""
