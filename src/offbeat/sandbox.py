"""Programs that the model wrote, run where they can do no harm.

from offbeat import sandbox

result = await sandbox.run("print(int(input()) + 1)", stdin="41")
reward = float(result.exit_code == 0 and result.stdout == "42\n")
"""

from offbeat.actor.sandbox import Local, NoSandboxError, Result, Sandbox, check, run, run_sync, use

__all__ = ["Local", "NoSandboxError", "Result", "Sandbox", "check", "run", "run_sync", "use"]
