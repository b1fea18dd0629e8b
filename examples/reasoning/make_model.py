"""Make a random character model that can read the prompts: python -m examples.reasoning.make_model FOLDER."""

import string
import sys
from pathlib import Path

from offbeat.deploy.local.quickstart.tiny_models import make_tiny_model

if __name__ == "__main__":
    make_tiny_model(Path(sys.argv[1]), alphabet=string.digits + string.ascii_letters + string.punctuation + " \n")
