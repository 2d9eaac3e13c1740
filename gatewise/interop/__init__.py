"""Interoperability with other systems: weight layouts, files, a Keras layer, and SystemML's and SystemDS' operators."""
