"""Shell completion: the script, and what completes passes and pipelines."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    bash: eval "$(hetjax completion bash)"; zsh: eval "$(hetjax completion zsh)";
    fish: hetjax completion fish | source
    """
    from hetjax.cli.main import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click knows no completion for {shell}")
    click.echo(kind(cli, {}, "hetjax", "_HETJAX_COMPLETE").source())


def complete_pass(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Returns the passes whose name starts with what was typed."""
    from hetjax.passes.registry import pass_names

    return [CompletionItem(name) for name in pass_names() if name.startswith(incomplete)]


def complete_pipeline(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Returns what was typed with its last pass completed."""
    from hetjax.passes.registry import ALIASES, pass_names

    done, comma, last = incomplete.rpartition(",")
    if "{" in last and "}" not in last:
        return []
    return [
        CompletionItem(f"{done}{comma}{name}")
        for name in (*pass_names(), *ALIASES)
        if name.startswith(last)
    ]
