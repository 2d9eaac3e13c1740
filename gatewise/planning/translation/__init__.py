"""The parts of a training step of `gatewise.models.Seq2Seq`: kept memory, workspace and recomputation of each."""
