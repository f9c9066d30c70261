"""`hetjax opt`: runs a pipeline of passes on a step, and shows what each of them did."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetjax.cli.completion import complete_pass, complete_pipeline
from hetjax.cli.emitters import EMITTERS
from hetjax.cli.main import EXIT_FAULT, EXIT_GOOD, EXIT_NEGATIVE, EXIT_REFUSED
from hetjax.cli.programs import is_traced, load_bundle, read_text, with_cluster, write_text
from hetjax.ir.errors import HetjaxError, MicrobatchError, ParseError, PassError, VerifyError

if TYPE_CHECKING:
    from hetjax.ir.bundle import Bundle
    from hetjax.passes.instruments import Time
    from hetjax.passes.manager import Instrument
    from hetjax.passes.registry import Pass

SPLIT = "// -----"


@dataclasses.dataclass(frozen=True)
class Request:
    """What the command line asked for; see the options of `opt`."""

    program: str = "-"
    pipeline: str = ""
    output: str | None = None
    cluster: str | None = None
    emit: str = "hj"
    show: tuple[str, ...] = ()
    before: bool = False
    diff: str | None = None
    dump: str | None = None
    verify: str = "each"
    timing: str | None = None
    stats: bool = False
    stop_after: str | None = None
    start_at: str | None = None
    limit: int | None = None
    rewrites: int | None = None
    split: bool = False
    verify_diagnostics: bool = False
    repro: str | None = None
    run_repro: str | None = None
    as_json: bool = False


# Options whose value may be left out. click would take the next word, the file's name, for the value.
_BARE = {"--diff": "--diff=unified", "--timing": "--timing=tree"}


class _Command(click.Command):
    """A command that knows which options may stand bare."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [_BARE.get(a, a) for a in args])


@click.command(cls=_Command, context_settings={"max_content_width": 110})
@click.argument("program", required=False, metavar="[PROGRAM]")
@click.option(
    "-p",
    "--pipeline",
    default="",
    metavar="PASSES",
    shell_complete=complete_pipeline,
    help="Passes in order: 'label-regions,cut-stages{stages=4}'; 'default' is the decorator's.",
)
@click.option("-o", "--output", metavar="FILE", help="Where the result goes; stdout when left out.")
@click.option("--cluster", metavar="FILE", help="The cluster, in place of the file's own.")
@click.option(
    "--emit",
    default="hj",
    type=click.Choice(list(EMITTERS)),
    show_default=True,
    help="Form of the result.",
)
@click.option("--list", "list_passes", is_flag=True, help="List the passes and stop.")
@click.option(
    "--help-pass",
    metavar="PASS",
    shell_complete=complete_pass,
    help="Explain one pass and its options.",
)
@click.option(
    "--print",
    "show",
    metavar="WHICH",
    multiple=True,
    shell_complete=complete_pass,
    help="Print the IR after passes: none, changed, all, or a pass's name (may be repeated).",
)
@click.option("--before", is_flag=True, help="With --print: also print what the passes got.")
@click.option(
    "--diff",
    metavar="[side]",
    type=click.Choice(["unified", "side"]),
    help="Show what each pass changed, op by op.",
)
@click.option(
    "--dump",
    metavar="DIR",
    help="Write numbered files, each with its one-pass command, and trace.jsonl.",
)
@click.option(
    "--verify",
    type=click.Choice(["each", "end", "off"]),
    default="each",
    show_default=True,
    help="When to verify.",
)
@click.option(
    "--timing",
    metavar="[tree|json]",
    type=click.Choice(["tree", "json"]),
    help="Time each pass and its phases.",
)
@click.option("--stats", is_flag=True, help="Count what each pass did.")
@click.option("--stop-after", metavar="PASS", help="Run up to and with the first PASS.")
@click.option("--start-at", metavar="PASS", help="Skip what comes before the first PASS.")
@click.option("--limit", type=click.IntRange(0), metavar="N", help="Run the first N passes only.")
@click.option(
    "--rewrites",
    type=click.IntRange(0),
    metavar="N",
    help="Let the last pass make its first N rewrites only.",
)
@click.option(
    "--split-input-file",
    "split",
    is_flag=True,
    help=f"Treat what stands between '{SPLIT}' lines as files of their own.",
)
@click.option(
    "--verify-diagnostics",
    is_flag=True,
    help="Expect the errors that '// expected-error {{…}}' lines announce.",
)
@click.option(
    "--repro",
    metavar="FILE",
    help="Where a failing pass leaves its reproducer; a new file when left out.",
)
@click.option(
    "--run-repro", metavar="FILE", help="Run the pipeline a reproducer holds, on its input."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout; the result needs -o."
)
def opt(list_passes: bool, help_pass: str | None, program: str | None, **options: Any) -> int:
    """Run passes on PROGRAM: step.hj, - for stdin (the default), or FILE.py:build.

    The result is the only thing on stdout; all else goes to stderr. Exit codes: 0 good; 1 wrong input, usage or
    a request that cannot be met; 2 a pass crashed or left invalid IR; 3 refused.
    """
    request = Request(program=program or "-", **options)
    if list_passes or help_pass:
        return _about_passes(help_pass, request)
    if request.as_json and request.output in (None, "-"):
        raise click.UsageError("--json prints to stdout; name a file for the result with -o")
    try:
        return _Run(request).run()
    except (HetjaxError, click.ClickException) as error:
        # Before any pass ran: the input or the pipeline is wrong.
        if not request.as_json:
            raise
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(json.dumps({"ok": False, "error": message, "passes": []}))
        return EXIT_NEGATIVE


def _about_passes(name: str | None, request: Request) -> int:
    from hetjax.cli.pass_docs import help_text, list_text, pass_facts, pass_list

    if request.as_json:
        click.echo(json.dumps(pass_facts(name) if name else pass_list(), default=str))
    else:
        click.echo(help_text(name) if name else list_text())
    return EXIT_GOOD


def _note(text: str) -> None:
    click.echo(text, err=True)


class _Run:
    """One invocation: its pieces of input, and what is reported at the end."""

    def __init__(self, request: Request):
        self.request = request
        self.results: list[str] = []
        self.reports: list[dict[str, Any]] = []

    def run(self) -> int:
        codes = []
        for number, (text, line) in enumerate(self.pieces()):
            codes.append(self.piece(text, line, number))
        code = max(codes, default=EXIT_GOOD, key=lambda c: (c == EXIT_FAULT, c))
        if self.results and not (code and len(self.results) == 0):
            write_text(
                f"{SPLIT}\n".join(r if r.endswith("\n") else r + "\n" for r in self.results),
                self._output(),
            )
        if self.request.as_json:
            report = (
                self.reports[0]
                if len(self.reports) == 1
                else {
                    "ok": all(r["ok"] for r in self.reports),
                    "pieces": self.reports,
                }
            )
            click.echo(json.dumps(report, default=str))
        return code

    def _output(self) -> str | None:
        return self.request.output

    def pieces(self) -> list[tuple[str | None, int]]:
        """Returns (text, first line) of each piece; None for Python code, which is traced."""
        name = self.request.run_repro or self.request.program
        if is_traced(name):
            return [(None, 1)]
        text = read_text(name)
        if not self.request.split:
            return [(text, 1)]
        out, start, lines = [], 1, []
        for i, line in enumerate(text.splitlines(keepends=True), 1):
            if line.strip() == SPLIT:
                out.append(("".join(lines), start))
                lines, start = [], i + 1
            else:
                lines.append(line)
        return [*out, ("".join(lines), start)]

    # -- one piece

    def piece(self, text: str | None, line: int, number: int) -> int:
        from hetjax.cli.diagnostics import Expectations

        expected = Expectations(text or "", line) if self.request.verify_diagnostics else None
        watch = self.watch()
        repro: list[Path] = []
        error: BaseException | None = None
        result: Bundle | None = None
        try:
            bundle = self.bundle(text, line)
            result = self.pipeline(bundle, text, watch, repro, number)
            emitted = self.emitted(result)
        except Exception as caught:
            error, emitted = caught, ""
        if expected is not None:
            problems = expected.unmet(error)
            for problem in problems:
                _note(problem)
            self.report(not problems, watch, problems, None)
            return EXIT_NEGATIVE if problems else EXIT_GOOD
        if error is None:
            self.results.append(emitted)
        self.summaries(watch)
        code = _code_of(error) if error is not None else EXIT_GOOD
        problems = _tell(error) if error is not None else []
        self.report(error is None, watch, problems, repro[0] if repro else None)
        if repro:
            _note(f"reproducer: {repro[0]}")
        return code

    def bundle(self, text: str | None, line: int) -> Bundle:
        if text is None:
            return load_bundle(self.request.program, self.request.cluster)
        from hetjax.ir.parser import parse_bundle

        name = self.request.run_repro or self.request.program
        # Blank lines before a later piece keep the line numbers of the whole file.
        bundle = parse_bundle("\n" * (line - 1) + text, filename="<stdin>" if name == "-" else name)
        return with_cluster(bundle, self.request.cluster)

    def passes(self, text: str | None) -> tuple[Pass, ...]:
        from hetjax.passes.dumping import reproducer_pipeline
        from hetjax.passes.pipeline_text import parse_pipeline

        pipeline = self.request.pipeline
        if self.request.run_repro is not None and not pipeline:
            found = reproducer_pipeline(text or "")
            if found is None:
                raise click.UsageError(
                    f"{self.request.run_repro} is no reproducer; give the passes with -p"
                )
            pipeline = found
        return cut_pipeline(parse_pipeline(pipeline), self.request)

    def watch(self) -> Time:
        from hetjax.passes.instruments import Time

        return Time()

    def pipeline(
        self, bundle: Bundle, text: str | None, watch: Time, repro: list[Path], number: int
    ) -> Bundle:
        from hetjax.passes.manager import run_pipeline
        from hetjax.passes.rewrites import limit_rewrites

        passes = self.passes(text)
        instruments = self.instruments(watch, repro, number)
        if self.request.rewrites is None or not passes:
            return run_pipeline(bundle, passes, instruments)
        bundle = run_pipeline(bundle, passes[:-1])
        with limit_rewrites(self.request.rewrites):
            return run_pipeline(bundle, passes[-1:], instruments)

    def instruments(self, watch: Time, repro: list[Path], number: int) -> list[Instrument]:
        from hetjax.passes.dumping import Dump, Reproducer
        from hetjax.passes.instruments import Diff, Print, VerifyEach

        r = self.request
        out: list[Instrument] = []
        if r.verify != "off":
            out.append(VerifyEach(r.verify))
        which = set(r.show) - {"none"}
        if which:
            out.append(
                Print(
                    next((w for w in ("all", "changed") if w in which), frozenset(which)),
                    _note,
                    before=r.before,
                )
            )
        if r.diff:
            width = shutil.get_terminal_size((160, 40)).columns
            out.append(Diff(_note, side=r.diff == "side", colour=use_colour(), width=width))
        if r.dump:
            out.append(Dump(Path(r.dump) / str(number) if r.split else r.dump))
        if not r.verify_diagnostics:
            out.append(Reproducer(r.repro, repro.append, shlex.join(["hetjax", *sys.argv[1:]])))
        return [*out, watch]

    def emitted(self, result: Bundle) -> str:
        from hetjax.cli.emitters import emit

        return emit(result, self.request.emit)

    # -- what is said

    def summaries(self, watch: Time) -> None:
        if self.request.timing == "json":
            _note(json.dumps(watch.as_dict()))
        elif self.request.timing:
            _note(watch.tree())
        if self.request.stats:
            _note(watch.statistics())

    def report(self, ok: bool, watch: Time, problems: Sequence[str], repro: Path | None) -> None:
        entry: dict[str, Any] = {"ok": ok, "file": self.request.output, "passes": watch.as_dict()}
        if problems:
            entry["error"] = "\n".join(problems)
        if repro is not None:
            entry["reproducer"] = str(repro)
        self.reports.append(entry)


def cut_pipeline(passes: tuple[Pass, ...], request: Request) -> tuple[Pass, ...]:
    """Returns the passes that --start-at, --stop-after and --limit leave.

    Raises:
      click.UsageError: a pass named is not in the pipeline.
    """
    names = [p.name for p in passes]
    for option, name in (("--start-at", request.start_at), ("--stop-after", request.stop_after)):
        if name is not None and name not in names:
            from hetjax.ir.suggest import nearest

            raise click.UsageError(
                f"{option}: '{name}' is not in the pipeline{nearest(name, names)}"
            )
    start = names.index(request.start_at) if request.start_at else 0
    if request.stop_after and request.stop_after not in names[start:]:
        raise click.UsageError(
            f"--stop-after: '{request.stop_after}' comes before --start-at '{request.start_at}'"
        )
    stop = names.index(request.stop_after, start) + 1 if request.stop_after else len(passes)
    passes = passes[start:stop]
    return passes if request.limit is None else passes[: request.limit]


def use_colour() -> bool:
    """Returns whether stderr shows colours and the user has not declined them (NO_COLOR)."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")


def _code_of(error: BaseException) -> int:
    if isinstance(error, MicrobatchError):
        return EXIT_REFUSED
    if isinstance(error, VerifyError):
        in_input = any("in the input" in note for note in getattr(error, "__notes__", ()))
        in_pass = any(
            note.startswith("found after pass") for note in getattr(error, "__notes__", ())
        )
        return EXIT_FAULT if in_pass and not in_input else EXIT_NEGATIVE
    return EXIT_NEGATIVE if isinstance(error, (HetjaxError, click.ClickException)) else EXIT_FAULT


def _tell(error: BaseException) -> list[str]:
    """Writes an error to stderr; returns its lines."""
    if isinstance(error, click.ClickException):
        lines = [error.format_message()]
    elif isinstance(error, (HetjaxError,)):
        lines = [str(error)]
    else:
        traceback.print_exception(error, file=sys.stderr)
        lines = [
            f"{type(error).__name__}: {error}",
            "This is a fault of hetjax or of the pass, not of your input.",
        ]
    lines += getattr(error, "__notes__", [])
    if isinstance(error, MicrobatchError):
        lines[0] = f"refused: {lines[0]}"
    elif not isinstance(error, ParseError):
        lines[0] = f"error: {lines[0]}"
    _note("\n".join(lines))
    return lines


__all__ = ["PassError", "Request", "cut_pipeline", "opt", "use_colour"]
