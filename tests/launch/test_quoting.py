import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardclip.launch.errors import LaunchError
from shardclip.launch.quoting import HIDDEN, for_sbatch, for_shell, redact


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_text_reaches_the_shell_as_one_word(text):
    printed = subprocess.run(
        ["bash", "-c", f"printf %s {for_shell(text)}"], capture_output=True, check=True
    )
    assert printed.stdout.decode() == text


def test_nul_is_rejected():
    with pytest.raises(LaunchError, match="NUL"):
        for_shell("a\0b")


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "\x1b[0m"])
def test_line_breaks_in_sbatch_lines_are_rejected(text):
    with pytest.raises(LaunchError, match="--job-name"):
        for_sbatch("job-name", text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "x"),
        ("WANDB_API_KEY", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("DB_PASSWORD", "x"),
        ("AUTH_HEADER", "x"),
        ("REMOTE", "https://me:hunter2@example.com/x"),
        ("ANY", "hf_abcdefgh"),
        ("ANY", "ghp_abcdefgh"),
        ("ANY", "sk-abcdef"),
        ("ANY", "0123456789abcdef0123456789abcdef01234567"),
    ],
)
def test_secrets_are_hidden(name, value):
    assert redact(name, value) == HIDDEN


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_DEBUG", "INFO"), ("MASTER_ADDR", "n1"), ("SLURM_JOB_ID", "12"), ("HF_TOKEN", "")],
)
def test_what_is_no_secret_is_shown(name, value):
    assert redact(name, value) == value
