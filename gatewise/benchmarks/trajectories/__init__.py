"""The loss of real models over hundreds of training steps, on every kernel, compared with that of nn.LSTM.

    python -m gatewise.benchmarks.trajectories

The models use what users' training uses: autocast and GradScaler, states carried from batch to batch, dropout, lengths,
clipping, optimizers, `DistributedDataParallel`. A kernel passes if its loss, averaged over windows, is as close to that
of nn.LSTM with the same seed as the losses of nn.LSTM with three seeds are to each other.
"""
