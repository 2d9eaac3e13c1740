"""Interoperability with other systems: their weight layouts, their files, a Keras layer and SystemML's operators."""
