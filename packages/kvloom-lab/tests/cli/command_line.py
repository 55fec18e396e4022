"""Runs a command in this process."""

from typer.testing import CliRunner

from kvloom_lab.cli.app import app


def run(*args, **kwargs):
    return CliRunner().invoke(app, [str(a) for a in args], **kwargs)
