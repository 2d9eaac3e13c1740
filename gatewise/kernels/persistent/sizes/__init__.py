"""Arithmetic on a problem and a device alone: the precision of products, pairs of layers, segments of a sequence."""
