"""The root command: subcommands by name, each imported when it runs; the exit codes.

Exit codes: 0 good; 1 input or usage, or a negative answer; 2 a fault of ours; 3 refused, with the
reason.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from hetjax.ir.errors import HetjaxError, MicrobatchError

EXIT_GOOD, EXIT_NEGATIVE, EXIT_FAULT, EXIT_REFUSED = 0, 1, 2, 3

# subcommand -> (module, attribute, one-line help). The help stands here so that `hetjax --help` imports no subcommand.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "agent": ("hetjax.cli.agent", "agent", "Hold this host's part of in-memory checkpoints."),
    "bisect": ("hetjax.cli.bisect", "bisect", "Find the pass and the rewrite that break a step."),
    "bugreport": ("hetjax.cli.bugreport", "bugreport", "Bundle a reproducer, versions and cluster, anonymous, into one archive."),
    "calibrate": ("hetjax.cli.calibrate", "calibrate", "Measure layers and links, and fit what plans are priced by."),
    "ckpt": ("hetjax.cli.ckpt", "ckpt", "List, check, repair, drain and size in-memory checkpoints."),
    "check": ("hetjax.cli.check", "check", "Run plain jit and hetjax side by side and compare every leaf."),
    "cluster": ("hetjax.cli.cluster", "cluster", "Show, validate and write cluster descriptions."),
    "completion": ("hetjax.cli.completion", "completion", "Print the completion script of a shell."),
    "demo": ("hetjax.cli.demo", "demo", "Train a small GPT across two unlike sites and prove it equal to plain jit."),
    "explain": ("hetjax.cli.explain", "explain", "Explain a plan: stages, reshards, memory, and why a value is where it is."),
    "opt": ("hetjax.cli.opt", "opt", "Run passes on a step and show what each of them did."),
    "report": ("hetjax.cli.report", "report", "Write a dumped run as one page, or as text that diffs."),
    "plan": ("hetjax.cli.plan", "plan", "Search for the plan under which a step takes least time."),
    "schedule": ("hetjax.cli.schedule", "schedule", "Make a pipeline schedule from plain times, prove it and draw it."),
    "simulate": ("hetjax.cli.simulate", "simulate", "Say what a plan should take before anything runs."),
    "trace": ("hetjax.cli.trace", "trace", "Trace a train step to IR text."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][2]) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hetjax", prog_name="hetjax")
def cli() -> None:
    """Runs unmodified Flax train steps across unlike devices."""


def main(args: list[str] | None = None) -> Any:
    """Runs the command line and exits with one of the codes above."""
    as_json = "--json" in (sys.argv[1:] if args is None else args)
    try:
        result = cli.main(args=args, prog_name="hetjax", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else EXIT_GOOD)
    except click.ClickException as error:
        error.show()
        _negative(error.format_message(), as_json)
        sys.exit(EXIT_NEGATIVE)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(EXIT_NEGATIVE)
    except MicrobatchError as error:
        click.echo(f"refused: {error}", err=True)
        _negative(str(error), as_json, True)
        sys.exit(EXIT_REFUSED)
    except HetjaxError as error:
        click.echo(f"error: {error}", err=True)
        _negative(str(error), as_json)
        sys.exit(EXIT_NEGATIVE)
    except Exception:
        import traceback

        traceback.print_exc()
        click.echo("This is a fault of hetjax, not of your input.", err=True)
        sys.exit(EXIT_FAULT)


def _negative(error: str, as_json: bool, refused: bool = False) -> None:
    """Prints the object that a command asked for JSON has not printed itself."""
    if as_json:
        import json

        click.echo(json.dumps({"ok": False, "refused": refused, "error": error}))
