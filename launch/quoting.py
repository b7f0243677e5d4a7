"""Text from a user made safe: for a shell, for an #SBATCH line, and for a reader's eyes."""

import re
import shlex

from .errors import LaunchError

_SECRET_NAME = re.compile(
    r"(?i)(secret|token|passw|pwd$|credential|private|api_?key|access_?key|auth|cookie|_key$|^key$)"
)
_SECRET_VALUE = re.compile(
    r"(?x)^(hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|ASIA|eyJ[\w-]+\.)"
    r"|-----BEGIN\ |://[^/\s:@]*:[^/\s@]+@|^[0-9a-f]{40,}$"
)
HIDDEN = "<hidden>"


def for_shell(text: str) -> str:
    """Quote one word for bash; raises LaunchError on a NUL, which no word can hold."""
    if "\0" in text:
        raise LaunchError(f"{text!r} has a NUL byte, which no command line can carry")
    return shlex.quote(text)


def for_sbatch(option: str, text: str) -> str:
    """Quote a value for an #SBATCH line, which sbatch splits by rules of its own.

    A backslash protects a quote and itself but no blank; `#` starts a comment outside of quotes;
    nothing expands.

    Raises:
        LaunchError: the value has a line break or another control character.
    """
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise LaunchError(
            f"--{option}={text!r}: a line break or control character cannot stand in an "
            "#SBATCH line; leave it out"
        )
    if re.fullmatch(r"[\w@%+=:,./\[\]-]+", text, flags=re.ASCII):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def redact(name: str, value: str) -> str:
    """Return a variable's value, or `<hidden>` where name or value looks like a secret's."""
    if value and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value)):
        return HIDDEN
    return value
