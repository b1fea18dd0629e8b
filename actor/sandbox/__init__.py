"""Programs that the model wrote, run where they can do no harm.

from offbeat.actor import sandbox

result = await sandbox.run("print(int(input()) + 1)", stdin="41")
reward = float(result.exit_code == 0 and result.stdout == "42\n")
"""

from offbeat.actor.sandbox.local import Local, NoSandboxError, check, run, run_sync, use
from offbeat.actor.sandbox.program import Result, Sandbox

__all__ = ["Local", "NoSandboxError", "Result", "Sandbox", "check", "run", "run_sync", "use"]
