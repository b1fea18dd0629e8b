"""Ready-made environments for `task.environment`, to be made in your own module: `play = tools([add], reward=is_right)`."""

from offbeat.actor.environments.mcp_servers import mcp
from offbeat.actor.environments.ready_made import gym, tools

__all__ = ["gym", "mcp", "tools"]
