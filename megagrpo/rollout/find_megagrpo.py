"""Makes this megagrpo importable in an engine's environment, which has none or another one, and nothing else of the
environment that it is in. Run as a file (runpy), before `import megagrpo`: standard library only."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SPEC = spec_from_file_location("megagrpo", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)])

if "megagrpo" not in sys.modules and SPEC is not None:
    sys.modules["megagrpo"] = module_from_spec(SPEC)
