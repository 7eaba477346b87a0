"""How the files of a prompt capability are rendered: Jinja in its sandbox, undefined names are errors.

Must never load a file that a template names: includes and imports have no loader.
"""

from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

REQUIRED_PROMPT = "user.md"
SYSTEM_PROMPT = "system.md"


def prompt_environment() -> ImmutableSandboxedEnvironment:
    """Return the one environment in which prompts are parsed and rendered."""
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
