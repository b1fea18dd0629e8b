"""Stand-ins for the packages of trackers: they note what they are asked for, as lines of JSON.

The real packages have their own claims (`test_real_trackers`), where they are installed.
"""

from pathlib import Path

NOTING = """
import json, os, time

def note(call, **values):
    with open(os.environ["NOTES"], "a") as file:
        print(json.dumps({"call": call, **values}), file=file)
"""

TRACKIO = f"""{NOTING}
class Run:
    def log(self, metrics, step):
        note("log", step=step, metrics=metrics)
        if "hangs" in os.environ:
            time.sleep(60)
    def finish(self):
        note("finish")

def init(project, name, config, resume, embed):
    note("init", project=project, name=name, resume=resume, settings=config)
    return Run()
"""


def write_trackio(folder: Path) -> None:
    """Write a package that stands in for trackio; with the variable `hangs`, logging takes a minute."""
    (folder / "trackio.py").write_text(TRACKIO)
