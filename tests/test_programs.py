"""Programs that tests start can be ended at any time."""

import signal
import time

from tests.programs import Agent


class Late:
    """An argument that a process takes long to read, so that it begins late."""

    def __reduce__(self):
        return time.sleep, (120,)


def test_an_agent_is_killed_before_it_has_begun_its_group(tmp_path):
    agent = Agent([], tmp_path / "log", print, Late())
    assert agent.poll() is None
    agent.kill()
    assert agent.wait(30) == -signal.SIGKILL
    agent.kill()
