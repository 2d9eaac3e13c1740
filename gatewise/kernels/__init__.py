"""The ways: every kernel of the library, in the order they are shown to a problem."""
