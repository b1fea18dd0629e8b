"""OpenEnv's reasoning gym with room for 64 sessions."""

from openenv.core.env_server.http_server import create_app
from reasoning_gym_env.models import ReasoningGymAction, ReasoningGymObservation
from reasoning_gym_env.server.reasoning_gym_environment import ReasoningGymEnvironment

app = create_app(
    ReasoningGymEnvironment, ReasoningGymAction, ReasoningGymObservation, env_name="reasoning_gym", max_concurrent_envs=64
)
