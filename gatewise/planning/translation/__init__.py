"""A training step of `gatewise.models.Seq2Seq`, part by part: what is kept, worked in, and computed again."""
