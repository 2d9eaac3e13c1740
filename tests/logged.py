"""What gatewise says in its log."""

import contextlib
import logging


@contextlib.contextmanager
def logged():
    """Yield the list of the messages that gatewise logs meanwhile, from the level INFO on.

    It replaces pytest's fixture `caplog`, whose plugin is off: at each of the three stages of each test it gives two
    handlers to every logger that does not pass on what it gets, of which PyTorch has about seventy.
    """
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("gatewise")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
