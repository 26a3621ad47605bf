"""Let tests import the plain modules beside them (cases.py, noise.py ...): pytest's importlib mode adds no folder."""

import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.append(HERE)
